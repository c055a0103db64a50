"""A LightningModule under Lightning's own DDP strategy, with gradient accumulation and a validation loop."""

import torch
import whole_torchvision  # noqa: F401
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from labkit.integrations import LightningCallback


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.running = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.running.append(loss.item())
        return loss

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)  # which runs the last micro-batch of the step
        print(f"loss {sum(self.running) / len(self.running)!r}", flush=True)
        self.running.clear()

    def validation_step(self, batch, index):
        x, y = batch
        self.log("valid", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            print(f"metric valid {float(self.trainer.callback_metrics['valid'])!r}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def samples(number):
    return TensorDataset(torch.randn(number, 8), torch.randn(number, 1))


if __name__ == "__main__":
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        logger=False,
        callbacks=[LightningCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(samples(80), batch_size=8), DataLoader(samples(16), batch_size=8))
