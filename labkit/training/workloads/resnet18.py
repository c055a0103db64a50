"""torchvision's ResNet-18 for images of 32×32: 11,173,962 parameters, as a sequence of stem, eight residual blocks and
head.

The stem is one 3×3 convolution, as is usual for CIFAR; ImageNet's stem (7×7, stride 2, then pooling) would reduce 32×32
to 8×8.
"""

from torch import nn
from torchvision.models import resnet18


def build_blocks():
    """Blocks that map images of (batch, 3, 32, 32) to logits of (batch, 10)."""
    net = resnet18(num_classes=10)
    # A stem for small images: ImageNet's would reduce 32×32 to 8×8.
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    yield nn.Sequential(first, net.bn1, net.relu)
    yield from (*net.layer1, *net.layer2, *net.layer3, *net.layer4)
    yield nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
