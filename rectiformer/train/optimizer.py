"""Adam, the learning-rate schedules, and the moving average of the weights."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rectiformer.config import TrainingConfig


def held_here(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter: its shard where it is sharded, else all of it."""
    # isinstance(parameter, DTensor) would cost every process a second of imports.
    to_local = getattr(parameter.detach(), "to_local", None)
    return parameter if to_local is None else to_local()


def learning_rate(config: TrainingConfig, hidden_size: int, step: int) -> float:
    """The learning rate of update `step`, counted from 1: of the step alone, so resuming needs nothing more."""
    if config.schedule == "noam":
        return config.learning_rate * hidden_size**-0.5 * min(step**-0.5, step * config.warmup**-1.5)
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    return config.learning_rate * after_warmup(config, step)


def after_warmup(config: TrainingConfig, step: int) -> float:
    """The share of the peak learning rate that update `step`, after the warm-up, has."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse-sqrt":
        return (config.warmup / step) ** 0.5
    left = max(0, config.steps - step)  # 0 also in a run whose steps were lowered
    falling = config.steps - config.warmup
    if config.schedule == "wsd":
        falling = min(falling, round(config.decay_fraction * config.steps))
    share = min(1.0, left / max(1, falling))
    return 0.5 - 0.5 * math.cos(math.pi * share) if config.schedule == "cosine" else share


def build_optimizer(config: TrainingConfig, parameters: Iterable[Tensor]) -> torch.optim.Adam:
    """Adam or AdamW in one kernel. Its learning rate is a tensor, to be set before every update."""
    optimizer = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    parameters = list(parameters)
    on_gpu = parameters[0].device.type == "cuda"
    return optimizer(
        parameters,
        lr=torch.zeros((), device=parameters[0].device),
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=on_gpu,
    )


def optimizer_tensors(optimizer: torch.optim.Adam, names: list[str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: `NAME/step`, `NAME/exp_avg`, `NAME/exp_avg_sq`."""
    (group,) = optimizer.param_groups
    return {
        f"{name}/{key}": value
        for name, parameter in zip(names, group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(optimizer: torch.optim.Adam, names: list[str], tensors: dict[str, Tensor]) -> None:
    """Load what `optimizer_tensors` returned."""
    (group,) = optimizer.param_groups
    for name, parameter in zip(names, group["params"], strict=True):
        state = {key: tensors[f"{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


class MovingAverage:
    """An exponential moving average of a model's weights, in float32."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [held_here(parameter) for parameter in model.parameters()]
        self.values = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.values, self.parameters, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the weights; a second call undoes it."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            held = parameter.clone()
            parameter.copy_(value)
            value.copy_(held)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))
