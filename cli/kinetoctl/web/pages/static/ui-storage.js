// Some browsers deny storage to frames of other sites, and the Perfetto UI does not start without: there it is in memory.
try {
  window.localStorage;
} catch {
  const kept = new Map();
  const value = {
    getItem: (name) => kept.get(String(name)) ?? null,
    setItem: (name, text) => { kept.set(String(name), String(text)); },
    removeItem: (name) => { kept.delete(String(name)); },
    clear: () => kept.clear(),
    key: (place) => [...kept.keys()][place] ?? null,
    get length() { return kept.size; },
  };
  Object.defineProperty(window, "localStorage", {value});
}
