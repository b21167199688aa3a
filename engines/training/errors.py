"""What can go wrong in using a training engine, one class each."""


class EngineError(RuntimeError):
    """Base of errors in the use of a training engine."""


class OffloadedPartError(EngineError):
    """A part (model, optimizer, gradients) was used while it is parked in host memory."""


class EngineModeError(EngineError):
    """Training was asked for inside ``eval_mode()``."""


class ForwardOnlyError(EngineError):
    """Training was asked of an engine that was built without optimizer."""


class AdapterNotSupported(EngineError, NotImplementedError):
    """The engine has no adapters (LoRA), so none can be disabled."""


class UnsupportedConfigError(EngineError, ValueError):
    """A setting that this backend or device cannot serve; nothing was built."""


class DeterminismError(UnsupportedConfigError):
    """``engine.deterministic`` asks for what this process's environment contradicts, or for what comes too late."""
