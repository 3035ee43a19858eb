"""Things that befall a worker at an exact moment, said in its environment and done in its own process.

A moment is ``KIND GENERATION NUMBER``: the NUMBER-th time (from 1) that this worker comes to KIND in that generation.

=============  ====================================================================================
``begun``      the ledger says that the step is begun; its all-reduce comes next
``sum``        the all-reduce of a step has come through; the optimizer comes next
``stepped``    the optimizers have stepped; the ledger does not say so yet
``applied``    the ledger says that the step is applied
``take``       the members have agreed to change to this generation; the transfer comes next
``asking``     just before the members agree on a number: whose state counts, or that all are there
``max``        they have
``broadcast``  a part of the state has gone round: 1 its head, 2 its values, 3 and on its tensors
``adopted``    the ledger says that the generation is adopted
=============  ====================================================================================

``DIE_AT``: the worker ends by SIGKILL. ``PAUSE_AT``: it waits until the file ``go`` is there. ``BREAK_AT`` (``sum``):
the collective has come through everywhere, but raises here, as it does where the last part comes too late.
"""

from pathlib import Path
from typing import Final

DIE, PAUSE, BREAK = "DIE_AT", "PAUSE_AT", "BREAK_AT"
GO: Final = "go"

_HOOKS: Final = """
import signal
from tidewright.elastic import group as group_module, ledger as ledger_module, offers as offers_module
from tidewright.elastic.errors import GroupBroken

class Moments:
    def __init__(self):
        self.seen = {}

    def reach(self, kind, generation):
        key = kind, generation
        self.seen[key] = self.seen.get(key, 0) + 1
        place = f"{kind} {generation} {self.seen[key]}"
        if os.environ.get("DIE_AT") == place:
            os.kill(os.getpid(), signal.SIGKILL)
        while os.environ.get("PAUSE_AT") == place and not os.path.exists("go"):
            time.sleep(0.005)
        return os.environ.get("BREAK_AT") == place

moments = Moments()

def after(owner, name, kind, generation_of):
    original = getattr(owner, name)
    def hooked(self, *arguments, **more):
        if name == "max":
            moments.reach("asking", self.generation)
        result = original(self, *arguments, **more)
        generation = generation_of(self, *arguments, **more)
        if moments.reach(kind or arguments[0], generation):
            time.sleep(0.3)  # the others have it by then
            self.mark_broken()
            raise GroupBroken("broken on purpose")
        return result
    setattr(owner, name, hooked)

for name in ("sum", "max", "broadcast"):
    after(group_module.Group, name, name, lambda group, *_: group.generation)
after(ledger_module.Ledger, "write", "", lambda ledger, kind, **fields: fields.get("generation"))
after(offers_module.Offers, "take", "take", lambda offers, generation: generation)

def hooked_step(step):
    def stepped():
        step()
        moments.reach("stepped", job.generation)
    return stepped
optimizer.step = hooked_step(optimizer.step)

"""


def put_hooks(script: Path) -> None:
    """Let the moments of this script's workers be chosen."""
    before, join, after = script.read_text().partition("with elastic.join() as job:")
    assert join
    script.write_text(before + _HOOKS + join + after)
