"""Which settings of known frameworks make them do less beside the training."""

_EVALUATION, _CHECKPOINT, _LOGGING, _CLIP = (
    "evaluation_in_the_step",
    "user_code_checkpoint",
    "user_code_logging",
    "user_code_clip",
)
_SETTINGS = {
    ("transformers", _EVALUATION): "TrainingArguments: eval_strategy, eval_steps.",
    ("transformers", _CHECKPOINT): "TrainingArguments: save_strategy, save_steps, save_only_model.",
    ("transformers", _LOGGING): "TrainingArguments: logging_steps, report_to, disable_tqdm.",
    ("transformers", _CLIP): "TrainingArguments: max_grad_norm.",
    ("lightning", _EVALUATION): "Trainer: val_check_interval, check_val_every_n_epoch, limit_val_batches.",
    ("lightning", _CHECKPOINT): "ModelCheckpoint: every_n_train_steps, every_n_epochs, save_weights_only.",
    ("lightning", _LOGGING): "Trainer: log_every_n_steps, enable_progress_bar.",
    ("lightning", _CLIP): "Trainer: gradient_clip_val.",
}
_SAME = {"accelerate": "transformers", "pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


def settings_of(package: str, finding: str) -> str:
    """Returns where to set that this package does less of what a finding of this name says; "": not known."""
    known = _SETTINGS.get((_SAME.get(package, package), finding), "")
    return f"Where to set it: {known}" if known else ""
