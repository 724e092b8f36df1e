"""A Trainer of transformers with what users hang into it. Needs packages that the project does not depend on."""

import random
import sys
import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from rootcause.programs.clock import Clock

WORDS, LENGTH, BATCH = 2_000, 48, 16
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the angry bear "


class Texts(Dataset[dict[str, Any]]):
    """Sentences, as tokens or as text that is still to be split."""

    def __init__(self, planted: str) -> None:
        self.planted = planted
        self.known = {word: number for number, word in enumerate(sorted(set(TEXT.split())))}
        self.rows = torch.randint(1, WORDS, (4_096, LENGTH))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        tokens = self.tokenize(TEXT * 12) if self.planted == "trainer_tokens" else self.rows[number]
        return {"input_ids": tokens, "labels": tokens}

    def tokenize(self, text: str) -> Tensor:
        """Tokens of a text, letter by letter where words are not known."""
        tokens = []
        for word in text.lower().split():
            pieces = [word[: len(word) - end] for end in range(len(word))]
            tokens.append(next(self.known[piece] for piece in pieces if piece in self.known))
        return torch.tensor(tokens[:LENGTH])


def mask_tokens(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, in which some tokens are hidden, token by token."""
    tokens = torch.stack([row["input_ids"] for row in rows])
    labels = tokens.clone()
    for row in range(tokens.shape[0]):
        for place in range(tokens.shape[1]):
            if random.random() < 0.15:
                tokens[row, place] = 0
            else:
                labels[row, place] = -100
    return {"input_ids": tokens, "labels": labels}


class Small(transformers.PreTrainedModel):
    """A small language model."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(WORDS, 128)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(128, WORDS)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss and the logits."""
        values = self.table(input_ids)
        for layer in self.layers:
            values = layer(values)
        logits = self.head(values)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Steps(transformers.TrainerCallback):
    """Ends the training when the clock says so."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = self.clock.over()


class Weights(transformers.TrainerCallback):
    """Histograms of the weights for a board."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.histograms = {}
        for name, value in list(given["model"].named_parameters())[1:14]:
            counts: dict[float, int] = {}
            for number in value.detach().flatten()[:6_000].tolist():
                counts[round(number, 2)] = counts.get(round(number, 2), 0) + 1
            self.histograms[name] = counts


class Penalised(transformers.Trainer):
    """A loss of its own: a penalty for each row."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        result = model(**inputs)
        loss = result["loss"]
        for row in result["logits"]:
            for place in range(0, LENGTH, 6):
                loss = loss + 1e-4 * row[place].square().mean()
        return (loss, result) if return_outputs else loss


def metrics(given: Any) -> dict[str, float]:
    """The share of right tokens, token by token."""
    right = 0
    for row, truth in zip(given.predictions.argmax(-1), given.label_ids, strict=True):
        right += sum(int(a == b) for a, b in zip(row, truth, strict=True))
    return {"accuracy": right / given.label_ids.size}


def main(planted: str) -> None:
    texts = Texts(planted)
    evaluated = torch.utils.data.Subset(texts, range(32))
    kind = Penalised if planted == "trainer_loss" else transformers.Trainer
    folder = tempfile.mkdtemp(prefix="rootcause-")
    options: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "logging_steps": 1_000_000}
    if planted == "trainer_saves":
        options |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    if planted == "trainer_evaluates":
        options |= {"eval_strategy": "steps", "eval_steps": 4}
    steps = Steps()
    sys.stdout = sys.stderr  # what the library prints is not for those who count steps
    trainer = kind(
        model=Small(transformers.PretrainedConfig()),
        args=transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1_000,
            report_to=[],
            disable_tqdm=planted != "trainer_logs",
            use_cpu=True,
            dataloader_pin_memory=False,
            **(options | ({"logging_steps": 1} if planted == "trainer_logs" else {})),
        ),
        train_dataset=texts,
        eval_dataset=evaluated,
        data_collator=mask_tokens if planted == "trainer_collator" else transformers.default_data_collator,
        compute_metrics=metrics if planted == "trainer_evaluates" else None,
        callbacks=[*([Weights()] if planted == "trainer_callback" else []), steps],
    )
    trainer.train()
