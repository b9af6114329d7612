"""Lightning's Trainer, with its own CSV logger; without checkpoints and a progress bar, as the other peers."""

from __future__ import annotations

from typing import Any

import lightning as L
from experiment import Experiment, Log, end
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self.experiment, self.model = experiment, experiment.model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        loss = self.experiment.loss(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = self.experiment.build_optimizer(self.model)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Clock(L.Callback):
    """Notes the times of the log records."""

    def __init__(self, log: Log) -> None:
        self.clock = log

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.clock.is_due(trainer.global_step) and trainer.is_global_zero:
            self.clock.tick(trainer.global_step)


def train() -> None:
    experiment = Experiment()
    settings = experiment.config
    loader = DataLoader(experiment.train_set, batch_size=experiment.share, shuffle=True, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=experiment.steps,
        max_epochs=-1,
        gradient_clip_val=settings.train.clip_grad_norm,
        log_every_n_steps=settings.train.log_every,
        logger=CSVLogger(settings.run.dir),
        callbacks=[Clock(Log(experiment))],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(experiment), loader)
    end()


if __name__ == "__main__":
    train()
