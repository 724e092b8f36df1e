"""A host with AMD's or Intel's GPUs as the kernel shows it: made-up /proc and /sys trees."""

from collections.abc import Mapping
from pathlib import Path


class DrmHost:
    """The two trees. `proc` and `sys` go to what reads them."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.sys = folder / "sys"
        for made in (self.proc / "sys/kernel", self.sys / "class/drm"):
            made.mkdir(parents=True)
        (self.proc / "sys/kernel/osrelease").write_text("6.12.1\n")
        self._kfd_ids: dict[str, int] = {}

    def gpu(self, driver: str, address: str, minor: int, **files: str) -> Path:
        """Adds a GPU with these files below its PCI device; __ in a name is a slash. Returns that device's folder."""
        device = self.sys / "devices" / f"pci{address[:7]}" / address
        self.write(device, files)
        bus = self.sys / "bus/pci/drivers" / driver
        bus.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(bus)
        node = self.sys / "class/drm" / f"renderD{minor}"
        node.mkdir()
        (node / "device").symlink_to(device)
        return device

    def kfd_node(self, node: int, gpu_id: int, minor: int) -> None:
        """Adds a node of ROCm's topology; 0 as the id: a CPU."""
        folder = self.sys / f"class/kfd/kfd/topology/nodes/{node}"
        self.write(folder, {"gpu_id": str(gpu_id), "properties": f"simd_count 1216\ndrm_render_minor {minor}\n"})

    def kfd_process(self, pid: int, vram: Mapping[int, int], queues: Mapping[int, int]) -> None:
        """Adds a process of ROCm: bytes by the GPU's id, and the GPU's id by the queue's number."""
        folder = self.sys / f"class/kfd/kfd/proc/{pid}"
        self.write(folder, {f"vram_{number}": str(size) for number, size in vram.items()})
        for queue, number in queues.items():
            self.write(folder / f"queues/{queue}", {"gpuid": str(number)})

    def process(self, pid: int, clients: Mapping[int, tuple[str, str]]) -> None:
        """Adds a process, or changes it: path and fdinfo of each descriptor."""
        folder = self.proc / str(pid)
        for kind in ("fd", "fdinfo"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        for number, (path, info) in clients.items():
            link = folder / "fd" / str(number)
            if not link.is_symlink():
                link.symlink_to(path)
            (folder / "fdinfo" / str(number)).write_text(f"pos:\t0\nflags:\t02100002\n{info}")

    @staticmethod
    def write(folder: Path, files: Mapping[str, str]) -> None:
        """Writes files below a folder; __ in a name is a slash."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")


def client(address: str, number: int, **values: str) -> str:
    """What a driver writes to fdinfo; _ in a name is a dash."""
    told = {"drm_driver": "xe", "drm_pdev": address, "drm_client_id": str(number), **values}
    return "".join(f"{name.replace('_', '-')}:\t{value}\n" for name, value in told.items())
