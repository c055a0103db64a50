"""The loop of nanoGPT's train.py: get_batch, a GradScaler that is disabled, and a loss that is divided by the number of
micro-steps."""

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
batch_size, block_size, vocab_size, n_embd = 6, 8, 32, 24
grad_clip, max_iters, eval_interval = 1.0, 6, 3
dtype = "float32"


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 48, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.block(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


init_process_group(backend="gloo")
torch.manual_seed(1337 + int(os.environ["RANK"]))
assert gradient_accumulation_steps % int(os.environ["WORLD_SIZE"]) == 0
gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
data = torch.randint(0, vocab_size, (4096,))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in ix]
    )


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


model = DDP(GPT())
raw_model = model.module
ctx = nullcontext()
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
X, Y = get_batch()  # the very first batch
iter_num = 0
while iter_num < max_iters:
    if iter_num % eval_interval == 0:
        print(f"valid {estimate_loss():.4f}")
    lossf = 0.0
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
        lossf += loss.item()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {lossf!r}", flush=True)
    iter_num += 1
destroy_process_group()
