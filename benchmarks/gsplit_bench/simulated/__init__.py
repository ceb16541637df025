"""A device that is not there: torch device "sim", for proving what a GPU would run where there is none.

Tensors of the device hold host tensors and answer every operation, so models, loaders and real gloo ranks run on it
unchanged and bit for bit as on the host. It refuses what CUDA refuses (mixed devices, ``numpy()``, host tensors in a
device's collective), runs backward in a thread of the device, and counts by file and line what CUDA would make the host
wait for, what it would launch and what would cross the bus. On top: streams and events with a check for races, and
NCCL's rules over gloo. ``torch.autocast`` casts as on CUDA, events are not over at once, and memory can have a limit, of
which communicators take as much as a test says. A process sees a second device, another rank's, on which its threads
start and where they may do nothing.

It has no clock: what it proves is what is computed, in which order, and who waits for whom.
"""

from gsplit_bench.simulated.backend import SimTensor, why_not_supported
from gsplit_bench.simulated.collectives import CheckedComm, CollectiveRules, RuleError, checked_mesh
from gsplit_bench.simulated.device import SimulatedDevice, simulated_device, switched_on
from gsplit_bench.simulated.log import DeviceCounts, DeviceLog
from gsplit_bench.simulated.streams import ContextError, Event, RaceError, Stream

__all__ = [
    "CheckedComm",
    "CollectiveRules",
    "ContextError",
    "DeviceCounts",
    "DeviceLog",
    "Event",
    "RaceError",
    "RuleError",
    "SimTensor",
    "SimulatedDevice",
    "Stream",
    "checked_mesh",
    "simulated_device",
    "switched_on",
    "why_not_supported",
]
