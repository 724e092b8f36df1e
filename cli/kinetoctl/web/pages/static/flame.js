// Frames tell what they are when pointed at, are found by text, and are reached by arrow keys. Links do the zooming.
const frames = [...document.querySelectorAll(".flame .frame")];
const about = document.getElementById("flame-about");
const said = about?.textContent;
const text = (frame) => frame.querySelector("title").textContent;
const box = (frame) => {
  const rect = frame.querySelector("rect");
  const [x, y, width] = ["x", "y", "width"].map((name) => Number(rect.getAttribute(name)));
  return {x, y, end: x + width};
};

const tell = (event) => {
  const frame = event.target.closest?.(".flame .frame");
  if (about) about.textContent = frame ? text(frame).replace("\n", ": ") : said;
};
document.addEventListener("pointerover", tell);
document.addEventListener("focusin", tell);

for (const tools of document.querySelectorAll(".flame-tools")) tools.hidden = false;
document.getElementById("flame-find")?.addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  let count = 0;
  for (const frame of frames) {
    const found = wanted !== "" && text(frame).split("\n")[0].toLowerCase().includes(wanted);
    frame.classList.toggle("found", found);
    frame.classList.toggle("aside", wanted !== "" && !found);
    count += found;
  }
  document.getElementById("flame-found").textContent = wanted === "" ? "" : `${count} of ${frames.length} frames`;
});

// One frame of each graph is in the order of the Tab key; arrow keys go to the frames beside, above and below it.
const row = 19;
const next = {
  ArrowRight: (from, to) => to.y === from.y && to.x >= from.end - 0.01 && to.x - from.end,
  ArrowLeft: (from, to) => to.y === from.y && to.end <= from.x + 0.01 && from.x - to.end,
  ArrowDown: (from, to) => to.y === from.y + row && to.x < from.end && to.end > from.x && Math.abs(to.x - from.x),
  ArrowUp: (from, to) => to.y === from.y - row && to.x < from.end && to.end > from.x && Math.abs(to.x - from.x),
};
for (const flame of document.querySelectorAll(".flame")) {
  const own = [...flame.querySelectorAll("a.frame")];
  own.forEach((frame, place) => frame.setAttribute("tabindex", place ? -1 : 0));
  flame.addEventListener("keydown", (event) => {
    const from = event.target.closest("a.frame");
    if (!from || !next[event.key]) return;
    event.preventDefault();
    let best = null;
    for (const frame of own) {
      const distance = next[event.key](box(from), box(frame));
      if (distance !== false && (best === null || distance < best.distance)) best = {frame, distance};
    }
    if (!best) return;
    from.setAttribute("tabindex", -1);
    best.frame.setAttribute("tabindex", 0);
    best.frame.focus();
  });
}
