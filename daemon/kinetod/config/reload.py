"""SIGHUP: rereads the configuration and applies what can change without a restart.

A configuration with errors changes nothing. The service manager is told when a reload begins and ends
(Type=notify-reload; with Type=notify and ExecReload= it works the same).
"""

import asyncio
import logging
from collections.abc import Callable

from kinetod.base import notify
from kinetod.config.config_sources import ConfigError, Origin, reloaded
from kinetod.config.setting import SettingSpec
from kinetod.config.settings import Config, Settings

log = logging.getLogger(__name__)


class Reloader:
    """Reloads on request, one at a time; requests during a reload cause one more."""

    def __init__(self, settings: Settings, origin: Origin, status: Callable[[], str]) -> None:
        self._settings = settings
        self._origin = origin
        self._status = status
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Asks for a reload; for signal handlers on the event loop."""
        self._asked.set()

    async def run(self) -> None:
        """Serves requests until it is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            notify.reloading()
            try:
                await self.reload()
            except Exception:
                log.exception("the configuration was not reloaded; the running one stays in force")
            notify.ready(self._status())

    async def reload(self) -> None:
        """Reads the configuration and puts it in force, or logs what is wrong with it."""
        try:
            loaded = await asyncio.to_thread(self._origin.load)
        except ConfigError as exc:
            for problem in exc.problems:
                log.error("%s", problem)
            log.error("the configuration has errors and was not reloaded; the running one stays in force")
            return
        for warning in loaded.warnings:
            log.warning("%s", warning)
        running = self._settings.current
        config, changed, waiting = reloaded(running, loaded.config)
        self._settings.replace(config)
        for key in waiting:
            log.warning("%s takes effect at the next start", _change(key, running, loaded.config))
        for key in changed:
            log.info("%s", _change(key, running, config))
        log.info("the configuration was reloaded: %d keys changed", len(changed))


def _change(key: SettingSpec, old: Config, new: Config) -> str:
    before, after = (key.show(getattr(config, key.field)) for config in (old, new))
    return f"{key.name}: {before} → {after}"
