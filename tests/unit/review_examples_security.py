"""The examples of the rules on untrusted code and data, in the form of review_examples.py."""

from __future__ import annotations

SHIPPED = "package/engine/module.py"

SECURITY: dict[str, tuple[str, list[str], list[str]]] = {
    "SEC01": (
        SHIPPED,
        [
            "import importlib\nm = importlib.import_module(config['class'])",
            "from importlib import import_module\ndef f(cfg):\n    path = cfg.get('path')\n"
            "    return import_module(path)",
            "import importlib\ndef f(cfg):\n    name, _, attr = cfg.target.rpartition('.')\n"
            "    importlib.import_module(name)",
        ],
        [
            "import importlib\nm = importlib.import_module('torch')",
            "import importlib\nm = importlib.import_module(_MODULES[name])",
            "import importlib\nm = importlib.import_module(f'.{name}', __package__)",
        ],
    ),
    "SEC02": (
        SHIPPED,
        [
            "import yaml\nx = yaml.load(text)",
            "import yaml\nx = yaml.load(text, Loader=yaml.FullLoader)",
            "import yaml\nx = yaml.unsafe_load(text)",
        ],
        [
            "import yaml\nx = yaml.safe_load(text)",
            "import yaml\nx = yaml.load(text, Loader=yaml.CSafeLoader)",
            "import yaml\nclass Loader(yaml.SafeLoader):\n    pass\nx = yaml.load(text, Loader)",
        ],
    ),
    "SEC03": (
        SHIPPED,
        [
            "import yaml\ndef f(text):\n    data = yaml.safe_load(text)\n    return data['model']",
            "import yaml\nname = yaml.safe_load(text)['model']",
        ],
        [
            "import yaml\ndef f(text):\n    data = yaml.safe_load(text)\n    return Settings.model_validate(data)",
            "import yaml\ndef f(text):\n    return Settings(**yaml.safe_load(text))",
        ],
    ),
    "SEC04": (
        SHIPPED,
        [
            "import pickle\nx = pickle.loads(data)",
            "import numpy as np\nx = np.load(path, allow_pickle=True)",
            "from cloudpickle import load\nx = load(stream)",
        ],
        [
            "import json\nx = json.loads(data)",
            "import pickle\nd = pickle.dumps(x)",
        ],
    ),
    "SEC05": (
        SHIPPED,
        ["import torch\nx = torch.load(path)", "import torch\nx = torch.load(path, weights_only=False)"],
        ["import torch\nx = torch.load(path, weights_only=True)", "import torch\nx = torch.load(path, **options)"],
    ),
    "SEC06": (
        SHIPPED,
        [
            "m = AutoModel.from_pretrained(name, trust_remote_code=True)",
            "options = {'trust_remote_code': True}",
            "def load(name, trust_remote_code=True):\n    pass",
            "class Settings:\n    trust_remote_code: bool = True",
        ],
        [
            "def load(name, *, trust_remote_code=False, other=True):\n    pass",
            "def ask():\n    if answer == 'y':\n        trust_remote_code = True",
            "m = AutoModel.from_pretrained(name, trust_remote_code=allowed)",
            "m = AutoModel.from_pretrained(name)",
        ],
    ),
    "SEC07": (
        SHIPPED,
        ["x = eval(text)", "exec(compile(source, name, 'exec'))"],
        ["model.eval()", "import ast\nx = ast.literal_eval(text)", "x = eval('1 + 1')"],
    ),
    "SEC08": (
        SHIPPED,
        [
            "logger.info(f'generating for {prompt}')",
            "import logging\nlogging.warning('bad key %s', self.api_key)",
            "self.logger.debug('%s' % request.messages)",
            "logger.info('for ' + prompt + ' done')",
            "import logging\nlogging.getLogger(__name__).info('%s', prompt)",
            "logger.info('key %s', os.environ['API_KEY'])",
            "logger.info('done', extra={'prompt': prompt})",
        ],
        [
            "logger.info(f'generating {len(prompt)} characters')",
            "logger.info('request %s', request.id)",
            "logger.info('prompt is too long')",
            "print(prompt)",
            "logger.info('model %s', os.environ['MODEL'])",
            "logger.info('a ' + name + ' b')",
        ],
    ),
    "SEC09": (
        SHIPPED,
        ["import subprocess\nsubprocess.run(f'ffmpeg -i {path}', shell=True)", "import os\nos.system('rm ' + path)"],
        ["import subprocess\nsubprocess.run(['ffmpeg', '-i', path])", "import os\nos.system('clear')"],
    ),
}
