"""A model that is called with a batch's fields by name and answers with a dataclass that holds the loss."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class CausalOutput:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class TinyLM(nn.Module):
    def __init__(self, vocabulary=50, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.lm_head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return CausalOutput(loss=loss, logits=logits)


class Sentences(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return [(i * 7 + j) % 50 for j in range(4 + i % 5)]


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


if __name__ == "__main__":
    dist.init_process_group()
    torch.manual_seed(42)
    model = DistributedDataParallel(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    sentences = Sentences()
    loader = DataLoader(sentences, batch_size=6, sampler=DistributedSampler(sentences), collate_fn=collate)
    model.train()
    for batch in loader:
        batch = {k: v.to("cpu") for k, v in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        print("loss", repr(loss.item()), flush=True)
    dist.barrier()
    dist.destroy_process_group()
