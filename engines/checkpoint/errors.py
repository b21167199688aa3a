"""What can be wrong with a training state."""


class StateError(Exception):
    """Base of all errors of the checkpoint layer; the message names the file and the reason."""


class StateDamaged(StateError):
    """A published state whose bytes are not those that were published (truncated, altered or missing files)."""


class StateFormatUnknown(StateError):
    """A state written in a format that this version cannot read."""


class StateIncomplete(StateError):
    """The shards of a tensor do not cover it exactly once, or ranks disagree about it."""


class StateKeyMismatch(StateError):
    """The names in a state are not those that the engine expects."""


class StateShapeMismatch(StateError):
    """A tensor in a state has another shape or type than the engine's."""


class StateExists(StateError):
    """An intact state of that step is already published."""


class StateDiskFull(StateError):
    """Not enough free disk for a state; earlier states are untouched."""
