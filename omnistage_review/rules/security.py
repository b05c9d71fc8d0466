"""Code and data that must not be trusted; what must not be logged."""

from __future__ import annotations

import ast
import re

from omnistage_review.registry import Hits, rule
from omnistage_review.syntax import (
    FUNCTIONS,
    ParsedFile,
    has_star_kwargs,
    keyword,
    last_name,
    literal,
    method,
    names_in,
    targets,
    walk_scope,
)

_CONFIG = re.compile(r"(^|_)(cfg|config|conf|settings|yaml|options|opts|manifest)(s?$|_)", re.IGNORECASE)
_PICKLE_MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle")
_PICKLES = {"joblib.load", "shelve.open", "pandas.read_pickle", "numpy.core.multiarray.load"} | {
    f"{module}.{name}" for module in _PICKLE_MODULES for name in ("load", "loads", "Unpickler")
}
_SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "BaseLoader", "CBaseLoader"}
_LOG_METHODS = {"debug", "info", "warning", "warn", "error", "critical", "exception", "log"}
_SECRETS = {
    "api_key", "apikey", "api_keys", "password", "passwd", "secret", "secret_key", "access_token",
    "auth_token", "authorization", "bearer_token", "hf_token", "private_key", "client_secret",
    "refresh_token",
}  # fmt: skip
_CONTENT = {
    "prompt", "prompts", "prompt_text", "user_input", "user_message", "user_prompt", "messages",
    "generated_text", "transcript", "conversation", "chat_history", "completion_text", "negative_prompt",
}  # fmt: skip


def _from_config(node: ast.expr) -> bool:
    """A value of a configuration: `config["x"]`, `cfg.x`, `settings.get("x")`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        return _from_config(node.func.value) or _CONFIG.search(last_name(node.func.value)) is not None
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
        if _CONFIG.search(last_name(node)):
            return True
    return False


def _assigned_from_config(file: ParsedFile, node: ast.expr) -> bool:
    """Whether a variable is, in its function, taken from a configuration."""
    if isinstance(node, ast.JoinedStr):
        return any(
            _assigned_from_config(file, part.value) for part in node.values if isinstance(part, ast.FormattedValue)
        )
    if isinstance(node, ast.Call) and method(node) in (
        "rsplit",
        "split",
        "rpartition",
        "partition",
        "strip",
        "replace",
    ):
        return isinstance(node.func, ast.Attribute) and _assigned_from_config(file, node.func.value)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        return _assigned_from_config(file, node.value)
    if _from_config(node):
        return True
    if not isinstance(node, ast.Name):
        return False
    for inner in walk_scope(file.scope(node)):
        if isinstance(inner, ast.Assign | ast.NamedExpr) and inner.lineno <= node.lineno:
            names = {last_name(item) for target in targets(inner) for item in ast.walk(target)}
            if node.id in names and not isinstance(inner.value, ast.Name) and _assigned_from_config(file, inner.value):
                return True
    return False


@rule(
    "SEC01",
    "Import named by a configuration",
    "high",
    "security",
    why="Whoever writes the configuration runs any code that is installed.",
    fix="Keep a registry: a dict from short names to functions or classes, and refuse names that are not in it.",
)
def import_from_config(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        imports = file.name(call.func) in ("importlib.import_module", "__import__", "pydoc.locate")
        if imports and call.args and _assigned_from_config(file, call.args[0]):
            yield call, f"`{ast.unparse(call)}` imports what a configuration names"


@rule(
    "SEC02",
    "YAML without a safe loader",
    "high",
    "security",
    why="Other loaders build any Python object that the file names: reading a configuration can run commands.",
    fix="Use yaml.safe_load, or a subclass of yaml.SafeLoader.",
)
def unsafe_yaml(file: ParsedFile) -> Hits:
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        if name in ("yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"):
            yield call, f"`{name}`"
        elif name in ("yaml.load", "yaml.load_all") and not has_star_kwargs(call):
            loader = keyword(call, "Loader") or (call.args[1] if len(call.args) > 1 else None)
            if loader is None or not _is_safe_loader(file, loader):
                yield call, f"`{name}` with {ast.unparse(loader) if loader is not None else 'no loader'}"


def _is_safe_loader(file: ParsedFile, loader: ast.expr) -> bool:
    """One of yaml's safe ones, a class of this file over one, or one of another file whose name says so."""
    name = last_name(loader)
    if name in _SAFE_LOADERS:
        return True
    for node in file.nodes(ast.ClassDef):
        if node.name == name:
            return any(_is_safe_loader(file, base) for base in node.bases)
    for assigned in file.assignments():
        if assigned.value is not None and any(last_name(target) == name for target in targets(assigned)):
            return bool(names_in(assigned.value) & _SAFE_LOADERS) or "CSafeLoader" in ast.unparse(assigned.value)
    return "safe" in name.lower() or (
        isinstance(loader, ast.Name) and loader.id in file.imports and "yaml" not in file.name(loader)
    )


@rule(
    "SEC03",
    "YAML without a schema",
    "medium",
    "security",
    why="A key that is misspelt is ignored and a value of the wrong type fails far away, in the middle of a request.",
    fix="Read the mapping into a typed model that refuses unknown keys (pydantic with extra='forbid', or a dataclass).",
)
def yaml_without_schema(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for call in file.nodes(ast.Call):
        if file.name(call.func) not in ("yaml.safe_load", "yaml.load"):
            continue
        parent = file.parent(call)
        if isinstance(parent, ast.Subscript) or (isinstance(parent, ast.Attribute) and parent.attr in ("get", "items")):
            yield call, "values of a YAML file are used as they are"
        elif isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            name = parent.targets[0].id
            if _is_indexed(file, call, name) and not _is_validated(file, call, name):
                yield call, f"keys of `{name}` are read without a schema"


def _is_indexed(file: ParsedFile, call: ast.AST, name: str) -> bool:
    return any(
        (isinstance(node, ast.Subscript) and last_name(node.value) == name and isinstance(literal(node.slice), str))
        or (
            isinstance(node, ast.Call)
            and method(node) == "get"
            and last_name(getattr(node.func, "value", None)) == name
        )
        for node in walk_scope(file.scope(call))
    )


def _is_validated(file: ParsedFile, call: ast.AST, name: str) -> bool:
    """Whether the mapping is given whole to a call, which then may check it."""
    for node in walk_scope(file.scope(call)):
        if isinstance(node, ast.Call):
            arguments = [*node.args, *(word.value for word in node.keywords)]
            if any(isinstance(item, ast.Name) and item.id == name for item in arguments) and method(node) not in (
                "len",
                "print",
            ):
                return True
    return False


@rule(
    "SEC04",
    "Pickle",
    "high",
    "security",
    why="Loading a pickle runs the code in it: a file or message from elsewhere takes over the process.",
    fix="Use safetensors for weights and JSON, msgpack or dataclasses of plain values for messages.",
)
def pickle_load(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        if name in _PICKLES:
            yield call, f"`{name}` runs code that is in its data"
        elif name == "numpy.load" and literal(keyword(call, "allow_pickle")) is True:
            yield call, "`numpy.load` with allow_pickle=True"


@rule(
    "SEC05",
    "torch.load without weights_only",
    "high",
    "security",
    why="A checkpoint is a pickle: without weights_only=True a downloaded file runs code when it is loaded.",
    fix="Pass weights_only=True, or read safetensors.",
)
def torch_load(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        if file.name(call.func) in ("torch.load", "torch.serialization.load") and not has_star_kwargs(call):
            value = keyword(call, "weights_only")
            if value is None or literal(value) is False:
                yield call, "`torch.load` without weights_only=True"


@rule(
    "SEC06",
    "trust_remote_code=True",
    "high",
    "security",
    why="Python files of a model's repository run with the rights of the service, in any later version too.",
    fix="Leave it off; where a model needs it, let the user ask for it by name and pin the revision.",
)
def remote_code(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        if literal(keyword(call, "trust_remote_code")) is True:
            yield call, f"`{method(call) or 'call'}` with trust_remote_code=True"
    for node in file.nodes(ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if literal(key) == "trust_remote_code" and literal(value) is True:
                yield value, "a mapping with trust_remote_code=True"
    for function in file.functions():
        positional = [*function.args.posonlyargs, *function.args.args]
        defaults = function.args.defaults
        pairs = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
        pairs += [
            (item, value)
            for item, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if value
        ]
        for item, default in pairs:
            if item.arg == "trust_remote_code" and literal(default) is True:
                yield default, f"the default of `{function.name}` is trust_remote_code=True"
    for assigned in file.assignments():
        is_own = any(last_name(target) == "trust_remote_code" for target in targets(assigned))
        if is_own and literal(assigned.value) is True and not isinstance(file.scope(assigned), FUNCTIONS):
            yield assigned, "trust_remote_code is True by default"


@rule(
    "SEC07",
    "eval or exec",
    "high",
    "security",
    why="Text becomes code. Where any part of it comes from a request or a file, that part runs.",
    fix="Parse the value (ast.literal_eval, JSON) or choose a function from a dict by its name.",
)
def evaluates(file: ParsedFile) -> Hits:
    if not file.is_shipped:
        return
    for call in file.nodes(ast.Call):
        is_plain = isinstance(call.func, ast.Name) and call.func.id not in file.imports  # not model.eval()
        if is_plain and method(call) in ("eval", "exec") and call.args and not isinstance(call.args[0], ast.Constant):
            yield call, f"`{method(call)}` of `{ast.unparse(call.args[0])[:60]}`"


@rule(
    "SEC08",
    "Secrets or user content in a log",
    "high",
    "security",
    why="Logs are copied, kept and read by many. Keys in them are lost, and prompts are personal data.",
    fix="Log an id, a length or a hash.",
)
def logged_secrets(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _LOG_METHODS:
            continue
        logger = call.func.value
        if file.name(getattr(logger, "func", None)) != "logging.getLogger" and not re.search(
            r"(^|_)(log|logger|logging)$", last_name(logger), re.IGNORECASE
        ):
            continue
        for value in _logged_values(call):
            name = _value_name(value)
            if name in _SECRETS:
                yield call, f"the secret `{ast.unparse(value)}` is logged"
            elif name in _CONTENT and not (isinstance(value, ast.Attribute) and _CONFIG.search(last_name(value.value))):
                yield call, f"what a user sent, `{ast.unparse(value)}`, is logged"


def _value_name(value: ast.expr) -> str:
    """The name of a value: of a variable, an attribute, or a key such as `environ["API_KEY"]`."""
    if isinstance(value, ast.Subscript):
        key = literal(value.slice)
        return key.lower() if isinstance(key, str) else last_name(value.value)
    return last_name(value)


def _parts(node: ast.expr) -> list[ast.expr]:
    """What `%` and `+` put into a text."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add):
        right = node.right.elts if isinstance(node.right, ast.Tuple) else _parts(node.right)
        return [*_parts(node.left), *right]
    return [node]


def _logged_values(call: ast.Call) -> list[ast.expr]:
    """The values that a log call prints as they are: arguments, and parts of an f-string or of `%`."""
    values: list[ast.expr] = []
    for item in [*call.args, *(word.value for word in call.keywords if word.arg not in ("exc_info", "stack_info"))]:
        if isinstance(item, ast.JoinedStr):
            values += [part.value for part in item.values if isinstance(part, ast.FormattedValue)]
        elif isinstance(item, ast.BinOp):
            values += _parts(item)
        elif isinstance(item, ast.Dict):
            values += item.values
        elif isinstance(item, ast.Call) and method(item) in ("format", "str", "repr"):
            values += item.args
        else:
            values.append(item)
    return values


@rule(
    "SEC09",
    "Shell command from variables",
    "high",
    "security",
    why="A file name or parameter with a semicolon or a backtick in it runs a command of its own.",
    fix="Pass a list of arguments without shell=True.",
)
def shell_command(file: ParsedFile) -> Hits:
    if file.is_test:
        return
    for call in file.nodes(ast.Call):
        name = file.name(call.func)
        command = call.args[0] if call.args else keyword(call, "args")
        shell = name.startswith("subprocess.") and literal(keyword(call, "shell")) is True
        if (
            (shell or name in ("os.system", "os.popen"))
            and command is not None
            and not isinstance(command, ast.Constant)
        ) and not isinstance(command, ast.Name):
            yield call, f"a shell runs `{ast.unparse(command)[:60]}`"
