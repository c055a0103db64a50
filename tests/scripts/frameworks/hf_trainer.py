"""A tiny GPT-2 from a config under the Trainer of transformers, with gradient accumulation and an evaluation."""

import tempfile

import torch
import whole_torchvision  # noqa: F401
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from labkit import integrations


class Tokens(Dataset):
    def __init__(self, number):
        self.rows = torch.randint(0, 64, (number, 16), generator=torch.Generator().manual_seed(number))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Printed(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print(f"loss {float(logs['loss'])!r}", flush=True)
        if "eval_loss" in logs:
            print(f"metric eval_loss {float(logs['eval_loss'])!r}", flush=True)


if __name__ == "__main__":
    set_seed(2)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            learning_rate=1e-3,
        )
        Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Tokens(128),
            eval_dataset=Tokens(16),
            callbacks=[Printed(), integrations.TrainerCallback()],
        ).train()
