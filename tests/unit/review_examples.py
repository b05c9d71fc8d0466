"""Code that each review rule must find, and code that it must leave alone. The examples are parsed, never run."""

from __future__ import annotations

from review_examples_security import SECURITY, SHIPPED

TEST = "tests/test_module.py"

# rule: (path of the file, examples that fail, examples that pass)
EXAMPLES: dict[str, tuple[str, list[str], list[str]]] = {
    "ERR01": (
        SHIPPED,
        [
            "def run(steps):\n    assert steps > 0",
            "class Engine:\n    def run(self, n):\n        assert n % 2 == 0, 'even'",
            "class Engine:\n    def __init__(self, n):\n        assert n > 0",
        ],
        [
            "def run(steps):\n    if steps < 1:\n        raise ValueError('steps')",
            "def _run(steps):\n    assert steps > 0",
            "class _Engine:\n    def __init__(self, n):\n        assert n > 0",
            "def run(x):\n    assert x is not None",
            "def run(x):\n    rows = f(x)\n    assert rows.shape == x.shape",
            "import triton\n@triton.jit\ndef kernel(BLOCK):\n    assert BLOCK > 0",
        ],
    ),
    "ERR02": (
        SHIPPED,
        ["try:\n    f()\nexcept:\n    g()"],
        ["try:\n    f()\nexcept:\n    g()\n    raise", "try:\n    f()\nexcept ValueError:\n    g()"],
    ),
    "ERR03": (
        SHIPPED,
        [
            "try:\n    f()\nexcept Exception:\n    pass",
            "def f():\n    try:\n        return g()\n    except Exception:\n        return None",
            "for x in y:\n    try:\n        f(x)\n    except (ValueError, BaseException):\n        continue",
            "from contextlib import suppress\nwith suppress(Exception):\n    f()",
        ],
        [
            "try:\n    f()\nexcept KeyError:\n    pass",
            "try:\n    f()\nexcept Exception as error:\n    log(error)",
            "try:\n    import flash_attn\nexcept Exception:\n    pass",
            "def f(name):\n    try:\n        import_module(name)\n    except Exception:\n        return",
            "def f():\n    try:\n        return g()\n    except Exception:\n        return FALLBACK",
            "def __del__(self):\n    try:\n        self.close()\n    except Exception:\n        pass",
        ],
    ),
    "ERR04": (
        SHIPPED,
        ["def f(stops=[]):\n    pass", "def f(*, options={}):\n    pass", "def f(x=dict()):\n    pass"],
        ["def f(stops=()):\n    pass", "def f(stops=None):\n    pass", "def f(x=frozenset()):\n    pass"],
    ),
    "TEN01": (
        SHIPPED,
        [
            "import torch\nx = y.cuda()",
            "import torch\nx = y.to('cuda:0')",
            "import torch\nx = torch.zeros(3, device='cuda')",
            "import torch\ndevice = torch.device('cuda:1')",
            "import torch\ndevice = torch.device('cuda', 0)",
            "import torch\ntorch.set_default_device('cuda')",
            "import torch\nclass Runner:\n    def __init__(self):\n        self.device = 'cuda'",
            "import torch\ndef load(path, device='cuda'):\n    pass",
        ],
        [
            "import torch\nx = torch.zeros(3, device=y.device)",
            "import torch\nif torch.cuda.is_available():\n    x = y.cuda()",
            "import torch\ndef capture_cuda_graph(y):\n    return y.to('cuda')",
            "x = y.to('cuda')",
            "import torch\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
            "import torch\ndevice = torch.device('cuda', rank)",
            "import torch\ndevice = 'cuda'\nif not torch.cuda.is_available():\n    device = 'cpu'",
            "import torch\nis_gpu = x.device == torch.device('cuda')",
        ],
    ),
    "TEN02": (
        SHIPPED,
        [
            "import torch\ny = x.view(batch, 32, 128)",
            "import torch\ny = x.reshape((-1, 4096))",
            "import torch\nx = torch.zeros(1, 4096)",
            "import torch\nx = torch.zeros(size=(1, 4096))",
            "import torch\nx = torch.full((1, 4096), 0.0)",
        ],
        [
            "import torch\nx = torch.full((1, n), 4096)",
            "import torch\ny = x.view(batch, heads, width)",
            "import torch\ny = x.view(batch, 2, -1)",
        ],
    ),
    "TEN03": (
        SHIPPED,
        ["import torch\ndef f(x, n):\n    return x.view(-1, n)"],
        [
            "import torch\ndef f(x):\n    return x.view(-1, x.shape[-1])",
            "import torch\ndef f(x):\n    return x.view(-1)",
            "import torch\ndef f(x, n):\n    if x.shape[-1] % n:\n        raise ValueError\n    return x.view(-1, n)",
        ],
    ),
    "TEN04": (
        SHIPPED,
        [
            "import torch\ny = torch.cat([a, b]).contiguous()",
            "import torch\ny = x.transpose(1, 2).contiguous().reshape(3, 4)",
            "import torch\ny = (a + b).clone()",
        ],
        [
            "import torch\ny = x.transpose(1, 2).contiguous().view(3, 4)",
            "import torch\ny = x.detach().clone()",
        ],
    ),
    "TEN05": (
        SHIPPED,
        ["import torch\nmodel = load_model()\ndef generate(x):\n    return model(x)"],
        [
            "import torch\nmodel = load_model()\n@torch.inference_mode()\ndef generate(x):\n    return model(x)",
            "import torch\ndef generate(model, x):\n    return model(x)",
            "import torch\nmodel = load_model()\ndef generate(x):\n    loss = model(x)\n    loss.backward()",
        ],
    ),
    "TEN06": (
        SHIPPED,
        [
            "import torch\nfor row in rows:\n    total += row.sum().item()",
            "import torch\nvalues = [row.max().cpu() for row in rows]",
            "import torch\nwhile running():\n    torch.cuda.synchronize()",
        ],
        [
            "import torch\nfor value in rows.sum(-1).tolist():\n    total += value",
            "import torch\ntotal = rows.sum().item()",
            "import torch\nfor row in rows.cpu():\n    use(row)",
        ],
    ),
    "NUM01": (
        SHIPPED,
        [
            "import torch\ny = torch.softmax(x.half(), -1)",
            "import torch\ny = torch.softmax(x, -1, dtype=torch.float16)",
            "import torch\nx = x.to(torch.bfloat16)\ny = x.softmax(-1)",
            "import torch.nn.functional as F\nimport torch\nloss = F.cross_entropy(logits.to(torch.float16), labels)",
        ],
        [
            "import torch\ny = torch.softmax(x.float(), -1)",
            "import torch\ny = torch.softmax(x.half(), -1, dtype=torch.float32)",
            "import torch\nif half:\n    x = x.half()\nelse:\n    y = x.softmax(-1)",
            "import torch\nx = x.half()\nx = x.float()\ny = x.softmax(-1)",
            "import torch\ny = torch.softmax(x, -1).to(torch.float16)",
        ],
    ),
    "QNT01": (
        SHIPPED,
        [
            "import torch\nq = (w / scale).to(torch.int8)",
            "import torch\nq = (w / scale).clamp(-128, 127).to(torch.int8)",
        ],
        [
            "import torch\nq = (w / scale).round().clamp(-128, 127).to(torch.int8)",
            "import torch\nq = torch.round(w / scales).to(torch.int8)",
            "import torch\npixels = (x * 255).to(torch.uint8)",
        ],
    ),
    "KV01": (
        SHIPPED,
        [
            "k_cache[:, :, start : start + n + 1] = k",
            "self.kv_cache[layer, position + 1] = k",
            "cache[:, max_seq_len] = v",
            "k_cache[pos + 1] = k",
            "cache_k[:b, start_pos + 1 : start_pos + n + 1] = k",
        ],
        [
            "k_cache[:, :, start : start + n] = k",
            "self.kv_cache[layer, position] = k",
            "cache[:, max_seq_len - 1] = v",
            "cache[name + 1] = value",
            "cache[position + 1] = value",
            "k_cache[:, start + 1 : end] = k",
            "table[:, position + 1] = k",
        ],
    ),
    "KV02": (
        SHIPPED,
        [
            "class Runner:\n    def __init__(self):\n        self.past_key_values = None\n"
            "    def step(self, x):\n        out = self.model(x, past_key_values=self.past_key_values)\n"
            "        self.past_key_values = out.past_key_values\n",
            "class Runner:\n    def __init__(self):\n        self.kv_cache = DynamicCache()\n"
            "    def generate(self, x):\n        return self.model(x, past_key_values=self.kv_cache)\n",
            "class Layer:\n    def __init__(self):\n        self.k_cache = None\n    def forward(self, k):\n"
            "        k = torch.cat([self.k_cache, k])\n        self.k_cache = k\n        return k\n",
        ],
        [
            "class Runner:\n    def __init__(self):\n        self.past_key_values = None\n"
            "    def step(self, x):\n        out = self.model(x, past_key_values=self.past_key_values)\n"
            "        self.past_key_values = out.past_key_values\n"
            "    def finish(self):\n        self.past_key_values = None\n",
            "class Layer:\n    def __init__(self):\n        self.k_cache = None\n    def start(self, k):\n"
            "        k = torch.cat([k, k])\n        self.k_cache = k\n",
            "class Runner:\n    def generate(self, x):\n        cache = DynamicCache()\n"
            "        return self.model(x, past_key_values=cache)\n",
            "class Runner:\n    def __init__(self):\n        self.kv_cache = DynamicCache()\n"
            "    def generate(self, x):\n        self.kv_cache.reset()\n"
            "        return self.model(x, past_key_values=self.kv_cache)\n",
        ],
    ),
    "MEM01": (
        SHIPPED,
        [
            "import functools\n@functools.cache\ndef embed(text):\n    return f(text)",
            "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef embed(text: str):\n    return f(text)",
            "class Encoder:\n    def __init__(self):\n        self.cache = {}\n"
            "    def encode(self, key):\n        self.cache[key] = f(key)",
            "_CACHE: dict[str, int] = {}\ndef get(key):\n    return _CACHE.setdefault(key, f(key))",
        ],
        [
            "import functools\n@functools.lru_cache(maxsize=64)\ndef embed(text):\n    return f(text)",
            "import functools\n@functools.cache\ndef cores(device: int):\n    return f(device)",
            "class Encoder:\n    def __init__(self):\n        self.cache = {}\n    def encode(self, key):\n"
            "        if len(self.cache) > 9:\n            self.cache.popitem()\n        self.cache[key] = f(key)",
            "def f(keys):\n    cache = {}\n    for key in keys:\n        cache[key] = 1",
        ],
    ),
    "MEM02": (
        SHIPPED,
        [
            "import queue\nq = queue.Queue()",
            "import asyncio\nq = asyncio.Queue(maxsize=0)",
            "import asyncio\nq = asyncio.Queue(-1)",
            "from queue import SimpleQueue\nq = SimpleQueue()",
        ],
        ["import queue\nq = queue.Queue(64)", "import asyncio\nq = asyncio.Queue(maxsize=limit)", "q = Queue()"],
    ),
    "MEM03": (
        SHIPPED,
        [
            "async def f(request):\n    return await request.body()",
            "from urllib.request import urlopen\nwith urlopen(url) as response:\n    data = response.read()",
            "import requests\ndata = requests.get(url).content",
            "import requests\ndef f(url):\n    response = requests.get(url)\n    return response.content",
            "import urllib.request\ndef f(url):\n    r = urllib.request.urlopen(url)\n    return r.read()",
            "async def f(image: UploadFile):\n    return await image.read()",
            "import websockets\ns = websockets.serve(f, max_size=None)",
        ],
        [
            "async def f(request):\n    return await read_at_most(request, LIMIT)",
            "from urllib.request import urlopen\nwith urlopen(url) as response:\n    data = response.read(LIMIT)",
            "with open(path) as stream:\n    data = stream.read()",
            "async def f(image: UploadFile):\n    return await image.read(LIMIT)",
            "def f(message):\n    return message.content",
        ],
    ),
    **SECURITY,
    "DIF01": (
        SHIPPED,
        [
            "import torch\ndef denoise(self, x, n):\n    timesteps = torch.linspace(1000, 0, n)\n"
            "    for t in timesteps:\n        x = self.scheduler.step(f(x, t), t, x)",
            "import torch\ndef denoise(scheduler, x, n):\n    for t in torch.linspace(999, 0, n):\n"
            "        x = scheduler.step(f(x, t), t, x)",
        ],
        [
            "import torch\ndef denoise(self, x, n):\n    self.scheduler.set_timesteps(n)\n"
            "    for t in self.scheduler.timesteps:\n        x = self.scheduler.step(f(x, t), t, x)",
            "import torch\nclass EulerScheduler:\n    def prepare(self, n):\n"
            "        timesteps = torch.linspace(1000, 0, n)\n"
            "        self.scheduler.step(timesteps)",
            "def denoise(scheduler, x, steps):\n    for t in range(len(steps)):\n"
            "        x = scheduler.step(f(x), steps[t], x)",
            "import torch\ndef embed(n):\n    timesteps = torch.arange(n)\n    return f(timesteps)",
        ],
    ),
    "DIF02": (
        SHIPPED,
        [
            "noise = noise_uncond + scale * (noise_uncond - noise_cond)",
            "noise = cond + guidance_scale * (uncond - cond)",
            "noise = uncond - scale * (cond - uncond)",
            "import torch\ndef f(x):\n    x = torch.cat([uncond_embeds, cond_embeds])\n"
            "    cond, uncond = model(x).chunk(2)",
        ],
        [
            "noise = noise_uncond + scale * (noise_cond - noise_uncond)",
            "noise = cond + (scale - 1) * (cond - uncond)",
            "noise = uncond - scale * (uncond - cond)",
            "noise = cond + (1 - scale) * (uncond - cond)",
            "import torch\ndef f(x):\n    x = torch.cat([uncond_embeds, cond_embeds])\n"
            "    uncond, cond = model(x).chunk(2)",
            "noise = noise_pred_uncond + s * (noise_pred_text - noise_pred_uncond)",
        ],
    ),
    "MM01": (
        SHIPPED,
        ["import torch\ndef merge(text_embeds, image_embeds):\n    return torch.cat([text_embeds, image_embeds], 1)"],
        [
            "import torch\ndef merge(text_embeds, image_embeds, position_ids):\n"
            "    return torch.cat([text_embeds, image_embeds], 1), position_ids",
            "import torch\ndef merge(text_embeds, more_text_embeds):\n"
            "    return torch.cat([text_embeds, more_text_embeds])",
        ],
    ),
    "MM02": (
        SHIPPED,
        [
            "import soundfile as sf\naudio, _ = sf.read(path)",
            "import torchaudio\nwave = torchaudio.load(path)[0]",
            "import torchaudio\ndef f(path):\n    wave, rate = torchaudio.load(path)\n    return wave",
            "from scipy.io import wavfile\n_, audio = wavfile.read(path)",
        ],
        [
            "import soundfile as sf\naudio, rate = sf.read(path)",
            "import torchaudio\ndef f(path):\n    wave, rate = torchaudio.load(path)\n    return wave, rate",
            "import librosa\naudio, _ = librosa.load(path, sr=16000)",
            "import soundfile as sf\naudio, _ = sf.read(path, samplerate=8000, format='RAW')",
        ],
    ),
    "MM03": (
        SHIPPED,
        [
            "import cv2\ndef f(p):\n    return cv2.imread(p)",
            "import numpy as np\nfrom PIL import Image\nx = np.array(Image.open(p))",
            "import numpy as np\nfrom PIL import Image\ndef f(p):\n    i = Image.open(p)\n    return np.array(i)",
        ],
        [
            "import cv2\ndef f(p):\n    return cv2.cvtColor(cv2.imread(p), cv2.COLOR_BGR2RGB)",
            "import cv2\ndef f(p):\n    return cv2.imread(p)[..., ::-1]",
            "import numpy as np\nfrom PIL import Image\nx = np.array(Image.open(p).convert('RGB'))",
            "import numpy as np\nfrom PIL import Image\ndef f(p):\n    i = Image.open(p).convert('RGB')\n"
            "    return np.array(i)",
        ],
    ),
    "CON01": (
        SHIPPED,
        [
            "import time\nasync def f():\n    time.sleep(1)",
            "import requests\nasync def f():\n    return requests.get(url, timeout=3)",
            "from subprocess import run\nasync def f():\n    run(['ls'])",
        ],
        [
            "import asyncio\nasync def f():\n    await asyncio.sleep(1)",
            "import time\ndef f():\n    time.sleep(1)",
            "import asyncio, time\nasync def f():\n    def wait():\n        time.sleep(1)\n"
            "    await asyncio.to_thread(wait)",
        ],
    ),
    "CON02": (
        SHIPPED,
        ["import asyncio\nasync def f():\n    asyncio.create_task(g())"],
        [
            "import asyncio\nasync def f():\n    task = asyncio.create_task(g())\n    await task",
        ],
    ),
    "CON03": (
        SHIPPED,
        ["async def f(self):\n    with self._lock:\n        await g()"],
        [
            "async def f(self):\n    async with self._lock:\n        await g()",
            "async def f(self):\n    with self._lock:\n        x = 1\n    await g()",
            "async def f(self):\n    with self.session:\n        await g()",
        ],
    ),
    "PAR01": (
        SHIPPED,
        ["import torch.distributed as dist\ndef f(rank):\n    if rank == 0:\n        dist.barrier()"],
        [
            "import torch.distributed as dist\ndef f(rank):\n    dist.barrier()\n    if rank == 0:\n        log()",
            "import torch.distributed as dist\ndef f(rank):\n    if rank == 0:\n        dist.broadcast(x, 0)\n"
            "    else:\n        dist.broadcast(y, 0)",
            "import torch.distributed as dist\ndef f(size):\n    if tokens_per_rank < size:\n        dist.barrier()",
        ],
    ),
    "API01": (
        SHIPPED,
        ["def run(steps):\n    return 1", "class Engine:\n    def run(self) :\n        return 1"],
        [
            "def run(steps: int) -> int:\n    return 1",
            "def _run(steps):\n    return 1",
            "class _Engine:\n    def run(self, x):\n        pass",
        ],
    ),
    "API02": (
        SHIPPED,
        ["def run() -> None:\n" + "    f()\n" * 12],
        ['def run() -> None:\n    """Runs."""\n' + "    f()\n" * 12, "def run() -> None:\n    f()\n"],
    ),
    "TST02": (
        TEST,
        [
            "import time\ndef test_fast():\n    start = time.perf_counter()\n    f()\n"
            "    assert time.perf_counter() - start < 1",
            "import time\ndef test_fast():\n    start = time.time()\n    f()\n"
            "    took = time.time() - start\n    assert 2 > took",
            "import time\ndef test_fast():\n    start = time.time()\n    f()\n    end = time.time()\n"
            "    assert end - start < 1",
            "import time\ndef test_fast():\n    start = time.time()\n    f()\n    took = time.time() - start\n"
            "    assert ok and 0 < took < 1",
            "import time\ndef test_fast(self):\n    start = time.time()\n    self.assertLess(time.time() - start, 1)",
        ],
        [
            "import time\ndef test_waits():\n    start = time.time()\n    f()\n"
            "    took = time.time() - start\n    assert took >= 1",
            "def test_count():\n    assert calls < 3",
            "import time\ndef test_order():\n    a = time.time()\n    b = time.time()\n    assert a <= b",
            "import time\ndef test_wait():\n    deadline = time.time() + 5\n    while not done():\n"
            "        assert time.time() < deadline",
        ],
    ),
    "TST03": (
        TEST,
        ["import time\ndef test_late():\n    start()\n    time.sleep(1)\n    assert done()"],
        [
            "import time\ndef test_late():\n    while not done():\n        time.sleep(0.01)",
            "import asyncio\nasync def test_late():\n    await asyncio.sleep(0)",
            "import time\ndef slow_handler():\n    time.sleep(1)",
        ],
    ),
}
