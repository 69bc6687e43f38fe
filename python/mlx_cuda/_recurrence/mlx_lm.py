"""Linear attention of ours in the places where mlx-lm's models look for their own."""

from __future__ import annotations

import contextlib
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from .gated_delta import choose, gated_delta, prepare
from .._common.arrays import resolve

if TYPE_CHECKING:
    from collections.abc import Callable


def _gated_delta(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's loop over time."""

    @wraps(theirs)
    def ops(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, mask: Any = None) -> Any:
        with contextlib.suppress(TypeError, ValueError):  # mlx-lm says itself what is wrong with the arguments
            if choose(prepare(q, k, v, g, beta, state=state, mask=mask), resolve(None)).engine != "upstream":
                return gated_delta(q, k, v, g, beta, state=state, mask=mask)
        return theirs(q, k, v, g, beta, state, mask)

    return ops


PLACES = {("mlx_lm.models.gated_delta", "gated_delta_ops"): _gated_delta}


def put() -> None:
    """Replace what has been imported by now."""
    for (module, name), ours in PLACES.items():
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None and not hasattr(theirs, "unpatched"):
            replaced = ours(theirs)
            vars(replaced)["unpatched"] = theirs
            setattr(sys.modules[module], name, replaced)


def take_away() -> None:
    """Bring mlx-lm's own functions back."""
    for module, name in PLACES:
        theirs = getattr(getattr(sys.modules.get(module), name, None), "unpatched", None)
        if theirs is not None:
            setattr(sys.modules[module], name, theirs)
