"""torchvision's ResNet-18 for images of 32×32: 11,173,962 parameters. The model is a sequence of blocks: stem, eight residual ones, head.

The stem is one 3×3 convolution, as is usual for CIFAR; ImageNet's (7×7, stride 2, then a pooling) would leave 8×8 of 32×32.
"""

from torch import nn
from torchvision.models import resnet18


def build_model() -> nn.Sequential:
    """The model: images of (batch, 3, 32, 32) to logits of (batch, 10)."""
    net = resnet18(num_classes=10)
    # For small images: ImageNet's 7×7 and the pooling behind it would leave 8×8.
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    stem = nn.Sequential(first, net.bn1, net.relu)
    blocks = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
    head = nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return nn.Sequential(stem, *blocks, head)
