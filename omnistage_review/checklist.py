"""The items of the review guide: by topic, with the rules that check them or none where a human must ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ENGINE, MODEL, WORKER = "engine", "model executor", "worker"
MULTIMODAL, DIFFUSION, SERVER, CONFIG, TESTS, DOCS = "multimodal", "diffusion", "server", "config", "tests", "docs"
COMPUTE = (ENGINE, MODEL, WORKER, DIFFUSION, MULTIMODAL)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to look at. Without rules it is a question for a human."""

    topic: str
    areas: tuple[str, ...]
    text: str
    rules: tuple[str, ...] = ()


TOPICS: dict[str, str] = {
    "tensors": "Shapes and devices are assumptions that hold for the author's checkpoint and machine. Read every view, "
    "index and constructor with another batch size, another head count and no GPU in mind.",
    "precision": "16 bits hold a value, but not a sum of many. Ask where sums, exponents and differences are computed, "
    "and in which type.",
    "memory": "A service runs for weeks. What grows by a request must shrink when it ends, also when it fails.",
    "KV cache": "A wrong position raises no error: the text becomes worse. Check the first token, the last token, the "
    "edge of a block and a prompt of length one by hand.",
    "batching": "Requests share a step. One must not change another's result, delay it without bound, or take it down.",
    "diffusion": "Noise, timesteps and guidance have conventions that differ by model. Compare with the reference "
    "pipeline at the same seed, not with a picture that looks good.",
    "multimodal": "Rates, ranges, orders and counts of placeholders must agree between processor and model.",
    "parallelism": "Every rank must take the same decisions in the same order.",
    "quantisation": "Scales have an axis and a type. Check both, and the error against the original weights.",
    "security": "Everything that a client or a checkpoint sends is hostile until it is checked.",
    "tests": "A test that cannot fail, or that fails by chance, is worse than none.",
}

ITEMS: tuple[Item, ...] = (
    Item("tensors", COMPUTE, "Tensors are made on the device of what they meet, not on a fixed one.", ("TEN01",)),
    Item("tensors", COMPUTE, "Sizes come from the configuration or from a tensor's shape.", ("TEN02",)),
    Item("tensors", COMPUTE, "A view with -1 cannot move elements between rows unnoticed.", ("TEN03",)),
    Item(
        "tensors", COMPUTE, "Does it work for a batch of one, an empty batch, and a length that no block size divides?"
    ),
    Item("tensors", (MODEL, DIFFUSION), "Is every in-place operation on a tensor that nobody else still reads?"),
    Item("precision", COMPUTE, "Softmax, norms and losses are computed in float32.", ("NUM01",)),
    Item(
        "precision",
        COMPUTE,
        "Does the output match the reference implementation on the same weights, and to which tolerance?",
    ),
    Item(
        "precision", (MODEL, DIFFUSION), "Are constants such as epsilon and scale those of the reference, in its type?"
    ),
    Item("memory", COMPUTE, "No clone or contiguous where the tensor is new or will be copied anyway.", ("TEN04",)),
    Item("memory", COMPUTE, "Forwards run under inference_mode.", ("TEN05",)),
    Item("memory", (ENGINE, WORKER, SERVER, MULTIMODAL), "Every cache has a size, and evicts.", ("MEM01",)),
    Item(
        "memory", (ENGINE, MODEL, WORKER, SERVER), "Defaults of parameters are not shared, mutable objects.", ("ERR04",)
    ),
    Item(
        "memory",
        (ENGINE, WORKER),
        "What is the largest amount that one request can take, and who returns it when the request fails?",
    ),
    Item("KV cache", (ENGINE, MODEL), "Writes cover [position, position + n) and nothing else.", ("KV01",)),
    Item(
        "KV cache", (ENGINE, MODEL, WORKER), "No keys and values of one request are left for the next one.", ("KV02",)
    ),
    Item(
        "KV cache", (ENGINE, MODEL), "Are blocks shared by prefix ever written to, and what does their hash leave out?"
    ),
    Item("KV cache", (ENGINE,), "After an abort, a preemption and an error: is every block returned exactly once?"),
    Item("batching", COMPUTE, "No `.item()` or `.cpu()` in a loop over rows or tokens.", ("TEN06",)),
    Item(
        "batching",
        (SERVER, ENGINE, WORKER),
        "Nothing blocks the event loop, and no lock of threads is held over an await.",
        ("CON01", "CON03"),
    ),
    Item("batching", (SERVER, ENGINE, WORKER), "Tasks are kept and their errors seen.", ("CON02",)),
    Item("batching", (SERVER, ENGINE, WORKER), "Queues are bounded; a full one refuses.", ("MEM02",)),
    Item("batching", (ENGINE, DIFFUSION), "Is the result of a request the same alone and in company?"),
    Item("batching", (ENGINE,), "Can a request starve while others pass it?"),
    Item("diffusion", (DIFFUSION,), "Timesteps come from the scheduler.", ("DIF01",)),
    Item(
        "diffusion",
        (DIFFUSION,),
        "Guidance is uncond + scale * (cond - uncond), in the order of the batch.",
        ("DIF02",),
    ),
    Item(
        "diffusion",
        (DIFFUSION,),
        "Is the initial noise made from the request's seed, on a device and in a type that do not change it?",
    ),
    Item("diffusion", (DIFFUSION,), "Does a cache of steps state its cost in quality next to its speed?"),
    Item("multimodal", (MULTIMODAL, MODEL, DIFFUSION), "Joined modalities carry positions or types.", ("MM01",)),
    Item("multimodal", (MULTIMODAL, SERVER), "The sample rate is read, compared and converted.", ("MM02",)),
    Item("multimodal", (MULTIMODAL, SERVER), "Channel order and mode of images are converted, not assumed.", ("MM03",)),
    Item(
        "multimodal",
        (MULTIMODAL, MODEL),
        "Does the number of placeholder tokens equal the number of encoder rows, for every size of input?",
    ),
    Item("multimodal", (MULTIMODAL,), "Are bytes, pixels and seconds limited before anything is decoded?"),
    Item("parallelism", (WORKER, ENGINE, MODEL), "Collectives are called on all ranks.", ("PAR01",)),
    Item(
        "parallelism",
        (WORKER, MODEL),
        "Are weights and caches divided along the axis that the product needs, and do heads divide evenly?",
    ),
    Item("parallelism", (WORKER,), "When a rank or process dies: who notices, and what do its requests get?"),
    Item("quantisation", (MODEL, ENGINE), "Values are rounded before they become integers.", ("QNT01",)),
    Item(
        "quantisation",
        (MODEL, ENGINE),
        "Do scales have the right axis, and is the error against the original weights measured?",
    ),
    Item(
        "security",
        (SERVER, CONFIG, ENGINE, MODEL, WORKER, MULTIMODAL, DIFFUSION),
        "Arguments are checked by raise, never by assert.",
        ("ERR01",),
    ),
    Item(
        "security",
        (SERVER, ENGINE, WORKER, MODEL, MULTIMODAL, DIFFUSION),
        "Exceptions are named, and none disappears.",
        ("ERR02", "ERR03"),
    ),
    Item("security", (SERVER, MULTIMODAL), "Bodies and downloads have a limit before they are read.", ("MEM03",)),
    Item(
        "security", (CONFIG, ENGINE, MODEL, SERVER), "Nothing is imported because a configuration names it.", ("SEC01",)
    ),
    Item("security", (CONFIG, SERVER, MODEL), "YAML is read with a safe loader and into a schema.", ("SEC02", "SEC03")),
    Item(
        "security",
        (MODEL, WORKER, ENGINE, CONFIG, DIFFUSION),
        "No pickle; torch.load with weights_only; no remote code.",
        ("SEC04", "SEC05", "SEC06"),
    ),
    Item(
        "security",
        (SERVER, CONFIG, WORKER, ENGINE),
        "No eval, exec or shell command from variables.",
        ("SEC07", "SEC09"),
    ),
    Item(
        "security",
        (SERVER, ENGINE, WORKER, MULTIMODAL, DIFFUSION),
        "Logs hold neither secrets nor what users send.",
        ("SEC08",),
    ),
    Item("security", (CONFIG,), "Shipped configurations are decided: no TODO.", ("CFG01",)),
    Item("security", (SERVER,), "Is the caller authenticated before the body is read, and is a limit per caller kept?"),
    Item("security", (SERVER, CONFIG), "What does a client that lies about a size, a type or a name get?"),
    Item("tests", (*COMPUTE, SERVER, CONFIG), "A new module has a test.", ("TST01",)),
    Item("tests", (TESTS,), "No test asserts a duration or sleeps.", ("TST02", "TST03")),
    Item("tests", (TESTS,), "Does each new test fail when the line that it is about is broken?"),
    Item("tests", (*COMPUTE, SERVER, CONFIG), "Public functions have types and a docstring.", ("API01", "API02")),
    Item("tests", (*COMPUTE, SERVER, CONFIG, TESTS), "Suppressions name a rule and a true reason.", ("SUP01",)),
    Item(
        "tests", (DOCS, CONFIG, SERVER), "Do the docs, the changelog and the default values say what the code now does?"
    ),
)


def items_for(areas: Iterable[str]) -> list[Item]:
    """The items that apply to these areas, in the order of the guide."""
    touched = set(areas)
    return [item for item in ITEMS if touched & set(item.areas)]
