"""Provides the interpreter's own standard library, whatever the program has put in its place. Part of the loader's
packet.

Theory of operation
    A program may have its own select.py or json.py in the first folder of sys.path, a module of such a name in
    sys.modules, or its own functions in the standard modules (gevent, eventlet, freezegun). The agent must run none of
        these, and the program must not see the agent's modules. So a standard module is the one in sys.modules, if that
        is the interpreter's: built in, frozen, or from its own folders; otherwise a private copy from those folders,
        which does not get into sys.modules. Its imports come from here too, and its `sys` is a copy with its own
        `modules`, where enum and the like look themselves up.
    typing is never loaded: the interpreter itself imports it by name from 3.12 on when a private copy is executed. The
    agent's type hints get distinguishable values (`_typing`), which is all that the agent needs.
    Of four modules the agent gets a copy with the original functions, whatever the program puts in their places, then
    or later: os (from posix), time, select and _thread. A built-in module that is created anew has them; up to Python
    3.9 some cannot be created twice, and the functions are found where gevent and eventlet keep them, or through
    objects that still refer to the module. That visits all objects with the GIL, so it is not done if there are many.
    After gc.freeze() there are none to visit: then the agent does not start.

    A built-in module that cannot be created twice enters sys.modules by itself; the previous entry is restored. An
    extension's imports by name use sys.modules: from 3.14 on _ctypes needs ctypes._layout for each structure. If the
    program has none, ours is there until it has been called. If it stayed, the program's own ctypes, which has
    different types, would find it ("this type has no size").

    If the program is importing a module at this moment, the agent waits for it. If a private copy were executed at the
    same time, process-wide registrations (re in copyreg, ctypes in _ctypes) could be the copy's, and the program could
    no longer pickle a compiled pattern. For the same reason private copies get a private copyreg.

    Files are read by `native` (opening_stub.c) in one call: between two calls of Python's own reader the program may
    close the descriptor and reuse its number for a pipe. For the same reason no folder is listed. It reads without the
    GIL, like posix.stat, so a slow file system does not block other threads. It also opens extension modules (`own`),
    and a private ctypes opens libraries by dlopen's address: another thread may hold the loader's lock for seconds, and
    that thread may need the GIL.

    A file that the process may not look at (EACCES) is not missing: the process has become another user, and what its
    own importer found instead might be the program's. So the import fails, in the bootstrap's words.

    There are no import statements here: `modules`, which is sys.modules, is given. The modules that are taken from it
    exist in every interpreter from its start.
"""

from __future__ import annotations  # set by the bootstrap's compile(); not evaluated

TYPE_CHECKING = False
if TYPE_CHECKING:
    import builtins
    import marshal
    import posix
    import sys
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

    modules: dict[str, Any] = {}
    own: Callable[[Any], Any]  # creates the extension module of that spec, once per process
    native: Callable[..., Any]
    high = 0  # where descriptors of ours begin
    dlopen = dlsym = 0  # their addresses
else:
    builtins, marshal, posix, sys = (modules[name] for name in ("builtins", "marshal", "posix", "sys"))

_Module: Any = type(sys)
_Builtin: Any = [].append.__class__  # the type of functions in C; the program may have replaced any that has a name
_machinery: Any = modules["_frozen_importlib"]
_files: Any = modules["_frozen_importlib_external"]
# C functions of modules that the agent uses and a program may have replaced.
_ORIGINALS = {
    "_thread": ("start_new_thread", "allocate_lock", "get_ident", "get_native_id"),
    "time": ("sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "thread_time", "thread_time_ns"),
    "select": ("poll",),
}
_COUNT_BYTES = 8
_RTLD_NOW, _C_CALL, _PYTHON_CALL = 2, 1, 5
_LAYOUT = "ctypes._layout"
_MOST_BLOCKS = 300_000  # of memory: each takes 54 ns to visit
_LOOKS, _PAUSE_S = 1000, 0.001  # at a module that the program is importing
# For private copies. enum looks up the modules of its users in its own `sys`.
_ALWAYS_PRIVATE = ("enum", "copyreg")
_MADE_TWICE = {"time": (3, 9), "_thread": (3, 10), "select": (3, 10)}  # from this Python on (multi-phase)
_OF_THE_PROGRAM = ("environ", "environb")  # in os; the program's changes to these count


class Standard:
    """The standard library's modules, as imported by the agent."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest  # called after each piece of work
        self._folders = list(_folders())
        self._found: dict[str, Any] = {}
        self._private: dict[str, Any] = {}
        self._builtins = dict(builtins.__dict__, __import__=self._import_privately)
        self._sys = _copy(sys)
        self._sys.modules = self._private
        self._import = builtins.__import__

    def import_(self, name: str, namespace: Any, local: Any, fromlist: Any, level: int) -> ModuleType:
        """Implements the import statement for everything but the agent's own modules."""
        try:
            found: ModuleType = self.get(name if fromlist else name.partition(".")[0])
            if not fromlist and "." in name:
                self.get(name)
        except LookupError:
            return self._import(name, namespace, local, fromlist, level)
        if isinstance(fromlist, list):  # from C (PyImport_Import), which takes it from there afterwards
            place = _modules_of_c(self.get("_ctypes"))
            place.setdefault(name, _lent(name, self.get(name), place))
        for attribute in fromlist or ():
            if attribute != "*" and not hasattr(found, attribute) and hasattr(found, "__path__"):
                setattr(found, attribute, self.get(name + "." + attribute))
        return found

    def get(self, name: str) -> Any:
        """Return the module. Raises LookupError if the standard library has none of that name."""
        if name not in self._found:
            self._found[name] = self._get(name)
        return self._found[name]

    def _get(self, name: str) -> Any:
        if name == "typing":
            return _typing(self.get("collections").namedtuple)
        module = self._imported(name)
        if not self._is_real(module):
            module = self._load(name)
        if name == "collections":
            return _without_text(module)
        return _original_os(module) if name == "os" else _original(name, module)

    def _imported(self, name: str) -> Any:
        """The entry in sys.modules once it is complete; after a second as it is."""
        for _ in range(_LOOKS):
            if not getattr(getattr(modules.get(name), "__spec__", None), "_initializing", False):
                break
            self.get("time").sleep(_PAUSE_S)
        return modules.get(name)

    def _is_real(self, module: Any) -> bool:
        if not isinstance(module, _Module):
            return False
        if getattr(getattr(module, "__spec__", None), "origin", None) in ("built-in", "frozen"):
            return True
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and any(
            file.startswith(folder + "/") and "-packages/" not in file[len(folder) :] for folder in self._folders
        )

    # ------------------------------------------------------------ private copies

    def _import_privately(
        self, name: str, namespace: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """Implements the import statement in private copies."""
        if name == "sys":
            return self._sys  # type: ignore[no-any-return]
        if name == "_ctypes":
            return _ctypes_without_gil(self.get(name))  # type: ignore[no-any-return]
        if name in _ALWAYS_PRIVATE:
            return self._load(name)  # type: ignore[no-any-return]
        if level:
            package = namespace["__package__"]
            for _ in range(level - 1):
                package = package.rpartition(".")[0]
            name = package + ("." + name if name else "")
        return self.import_(name, namespace, local, fromlist, 0)

    def _load(self, name: str) -> Any:
        """Load a module. Raises LookupError, and whatever the module raises."""
        if name in self._private:
            return self._private[name]
        parent, _dot, last = name.rpartition(".")
        places = self._folders
        if parent:
            package = self.get(parent)
            places = getattr(package, "__path__", [])
        try:
            spec = _machinery.BuiltinImporter.find_spec(name) or _find(name, places)
        except PermissionError as exc:
            if name in modules and name not in getattr(sys, "stdlib_module_names", ()):  # the program's; 3.10 and later
                raise LookupError(name) from None
            raise _denied(name, next(place for place in places if exc.filename.startswith(place + "/"))) from None
        if spec is None:
            raise LookupError(name)
        if isinstance(spec.loader, _files.SourceFileLoader):
            self._execute(spec)
        else:
            self._private[name] = _native(spec)
        if parent in self._private:
            setattr(self._private[parent], last, self._private[name])
        self._rest()
        return self._private[name]

    def _execute(self, spec: Any) -> None:
        """Make a private copy of a module written in Python."""
        module = self._private[spec.name] = _Module(spec.name)
        module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
        module.__package__ = spec.parent
        module.__dict__["__builtins__"] = self._builtins
        if spec.submodule_search_locations is not None:
            module.__path__ = spec.submodule_search_locations
        try:
            code = spec.loader.get_code(spec.name)
            self._rest()
            exec(code, module.__dict__)  # noqa: S102 - the standard library
        except BaseException as exc:
            del self._private[spec.name]
            if isinstance(exc, PermissionError):  # of its file: no module opens another one while it is executed
                raise _denied(spec.name, spec.origin) from None
            raise


def _folders() -> Iterator[str]:
    """Folders of the interpreter's standard library."""
    version = "python%d.%d" % sys.version_info[:2]
    known = [getattr(sys, "_stdlib_dir", None)]
    known += ["%s/%s/%s" % (prefix, sys.platlibdir, version) for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    known.append("%s/lib/%s" % (sys.base_prefix, version))
    seen = set()
    for folder in known:
        if folder and folder not in seen:
            seen.add(folder)
            yield folder
    for folder in [*("%s/lib-dynload" % folder for folder in list(seen)), *sys.path]:
        if folder not in seen and folder.endswith("/lib-dynload"):
            seen.add(folder)
            yield folder


def _find(name: str, places: list[str]) -> Any:
    """The spec of a module, found by its file: sys.path_hooks and their cache belong to the program."""
    last = name.rpartition(".")[2]
    loaders = (
        (_files.ExtensionFileLoader, modules["_imp"].extension_suffixes()),
        (_source_loader(), _files.SOURCE_SUFFIXES),
    )
    for place in places:
        for stem, folders in (
            ("/".join((place, last, "__init__")), ["/".join((place, last))]),
            (place + "/" + last, None),
        ):
            for loader, suffixes in loaders:
                for suffix in suffixes:
                    if _is_file(stem + suffix):
                        return _files.spec_from_file_location(
                            name, stem + suffix, loader=loader(name, stem + suffix), submodule_search_locations=folders
                        )
    return None


def _is_file(path: str) -> bool:
    """Raises PermissionError where the process may not look."""
    try:
        return posix.stat(path).st_mode & 0o170000 == 0o100000
    except PermissionError:
        raise
    except OSError:
        return False


def _denied(name: str, path: str) -> ImportError:
    """In the words that the daemon knows (bootstrap.py)."""
    return ImportError("standard library: no %s; EACCES %d %s" % (name, posix.geteuid(), path))


def _encoded(path: str) -> bytes:
    return path.encode(sys.getfilesystemencoding(), "surrogateescape")


def _read_file(path: str) -> bytes:
    most = posix.stat(path).st_size + 1
    room = bytes(_COUNT_BYTES + most)
    native(_encoded(path), None, id(room) + bytes.__basicsize__ - 1, most, high)  # noqa: F821 - given
    count = int.from_bytes(room[:_COUNT_BYTES], sys.byteorder, signed=True)
    if not 0 <= count < most:
        raise OSError(max(-count, 0), "a file of the standard library cannot be read or is growing", path)
    return room[_COUNT_BYTES : _COUNT_BYTES + count]


def _source_loader() -> Any:
    class Loader(_files.SourceFileLoader):  # type: ignore[misc]
        def get_data(self, path: str) -> bytes:
            return _read_file(path)

        def set_data(self, *_arguments: Any, **_mode: Any) -> None:
            """Write nothing: no compiled file next to the source."""

    return Loader


def _native(spec: Any) -> Any:
    """A copy of a built-in module or an extension that is not the program's."""
    if isinstance(spec.loader, _files.ExtensionFileLoader):
        return own(spec)  # noqa: F821 - given
    before = modules.get(spec.name, modules)  # None keeps it from being imported
    module = _machinery.module_from_spec(spec)
    spec.loader.exec_module(module)
    if modules.get(spec.name, modules) is not before:
        if before is modules:
            modules.pop(spec.name, None)
        else:
            modules[spec.name] = before
    return module


def _modules_of_c(ctypes: Any) -> Any:
    """sys.modules, or what was that before the program put another in its place."""
    function = _c_function(ctypes, _C_CALL)(dlsym)(None, b"PyImport_GetModuleDict")
    return ctypes.PyObj_FromPtr(_c_function(ctypes, _PYTHON_CALL)(function)()) if function else modules


def _c_function(ctypes: Any, flags: int) -> Any:
    """The type of functions in C that return an address; None for NULL."""

    class Address(ctypes._SimpleCData):  # type: ignore[misc]
        _type_ = "P"

    class Function(ctypes.CFuncPtr):  # type: ignore[misc]
        _flags_ = flags
        _restype_ = Address

    return Function


def _lent(name: str, module: Any, place: Any) -> Any:
    """What stands there for it until it has been used."""
    if name != _LAYOUT:
        return module
    made = _copy(module)

    def get_layout(*arguments: Any, **options: Any) -> Any:
        if place.get(name) is made:
            del place[name]
        return module.get_layout(*arguments, **options)

    made.get_layout = get_layout
    return made


# ------------------------------------------------------------ original functions


def _copy(module: Any) -> Any:
    made = _Module(module.__name__)
    made.__dict__.update(module.__dict__)
    return made


def _ctypes_without_gil(module: Any) -> Any:
    """_ctypes whose dlopen waits without the GIL, for a private ctypes, which calls it while it is imported."""
    Function = _c_function(module, _C_CALL)

    def without_gil(name: Any, mode: int = 0) -> Any:
        handle = Function(dlopen)(name and _encoded(name), mode | _RTLD_NOW)
        if not handle:
            raise OSError("%s cannot be opened" % name)
        return handle

    made = _copy(module)
    made.dlopen = without_gil
    return made


def _without_text(module: Any) -> Any:
    """collections whose namedtuple compiles before it evaluates: evaluating text makes the interpreter forget that an
    interrupt ends the program, which then exits with status 1.
    """
    made, function = _copy(module), module.namedtuple
    make: Any = type(function)

    def evaluated(text: str, names: dict[str, Any]) -> Any:
        return eval(compile(text, "<string>", "eval"), names)  # noqa: S307 - namedtuple's own

    names = dict(function.__globals__, __builtins__=dict(builtins.__dict__, eval=evaluated))
    made.namedtuple = make(function.__code__, names, "namedtuple")
    made.namedtuple.__kwdefaults__ = function.__kwdefaults__
    return made


def _original_os(module: Any) -> Any:
    """os with the functions of posix, which are never replaced."""
    made = _copy(module)
    for name, value in posix.__dict__.items():
        if name in made.__dict__ and name not in _OF_THE_PROGRAM and not name.startswith("__"):
            made.__dict__[name] = value
    return made


def _original(name: str, module: Any) -> Any:
    """A copy of one of these modules, with its own functions instead of replaced ones."""
    if name not in _ORIGINALS:
        return module
    replaced = [each for each in _ORIGINALS[name] if not _is_own(name, module.__dict__.get(each))]
    made = _copy(module)
    if not replaced:
        return made
    if sys.version_info >= _MADE_TWICE[name]:
        made.__dict__.update(_native(module.__spec__).__dict__)
        return made
    for function in _referring(module):
        if function.__name__ in replaced:
            made.__dict__[function.__name__] = function
    missing = [each for each in replaced if not _is_own(name, made.__dict__[each])]
    if missing:
        text = "the program has replaced %s.%s, and the original cannot be found (gc.freeze, or too many objects)"
        raise ImportError(text % (name, missing[0]))
    return made


def _is_own(name: str, function: Any) -> bool:
    return type(function) is _Builtin and getattr(getattr(function, "__self__", None), "__name__", None) == name


def _referring(module: Any) -> list[Any]:
    """The functions of a C module that still exist, whether or not the module has them itself; may be incomplete if
    there are many objects.
    """
    saved = getattr(modules.get("gevent.monkey"), "saved", None) or {}
    original = modules.get("__original_module_" + module.__name__)  # eventlet's
    kept = [*saved.get(module.__name__, {}).values(), *getattr(original, "__dict__", {}).values()]
    if not 0 < sys.getallocatedblocks() <= _MOST_BLOCKS:
        return [found for found in kept if _is_own(module.__name__, found)]
    collector = modules.get("gc") or _native(_machinery.BuiltinImporter.find_spec("gc"))
    return [found for found in [*kept, *collector.get_referrers(module)] if _is_own(module.__name__, found)]


# ------------------------------------------------------------ typing


class _Hint:
    """A type hint, equal to any hint written the same way."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, parameters: object) -> _Hint:
        return _Hint("%s[%r]" % (self._text, parameters))

    def __repr__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return repr(other) == self._text

    def __hash__(self) -> int:
        return hash(self._text)


# Names that typing.NamedTuple does not copy from the class's body either.
_NOT_TAKEN = ("__module__", "__annotations__", "__annotate__", "__annotate_func__")


def _typing(namedtuple: Any) -> Any:
    """A module with the names of typing."""

    class Meta(type):
        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
            if not bases:
                return type.__new__(cls, name, bases, body)
            annotate = body.get("__annotate__") or body.get("__annotate_func__")  # from 3.14 on
            types = body.get("__annotations__") or (annotate(1) if annotate else {})
            defaults = [body[field] for field in types if field in body]
            made = namedtuple(name, types, defaults=defaults, module=body["__module__"])
            made.__annotations__ = types
            for key, value in body.items():
                if key not in _NOT_TAKEN and key not in types:
                    setattr(made, key, value)
            return made

    class NamedTuple(metaclass=Meta):
        """The base of classes that are tuples."""

    made = _Module("typing")
    made.NamedTuple, made.Protocol, made.TYPE_CHECKING = NamedTuple, object, False
    made.__getattr__ = _Hint
    return made
