// Curves of memory: a drag chooses a stretch of time, a click a moment; a row of the blocks shows its time in its curve.
const form = document.getElementById("memory");
const curves = [...document.querySelectorAll("figure.curve")];
const placeOf = (svg) => {
  const [first, last, left, right, top, bottom] = ["first", "last", "left", "right", "top", "bottom"]
    .map((name) => Number(svg.dataset[name]));
  return {first, last, left, right, top, bottom};
};
const span = (svg, kind) => {
  let rect = svg.querySelector(`.${kind}`);
  if (!rect) {
    rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    rect.classList.add(kind);
    svg.prepend(rect);
  }
  return (from, until) => {
    const {top, bottom} = placeOf(svg);
    const box = {x: Math.min(from, until), y: top, width: Math.max(Math.abs(until - from), 1), height: bottom - top};
    for (const [name, value] of Object.entries(box)) rect.setAttribute(name, value);
  };
};

const least = 4;  // units of the chart: a shorter drag is a click
const choose = (values) => {
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  form.requestSubmit();
};
for (const figure of curves) {
  const svg = figure.querySelector("svg");
  const {first, last, left, right} = placeOf(svg);
  const at = (event) => {
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    return Math.min(Math.max(x, left), right);
  };
  const time = (x) => {
    const us = first + (last - first) * (x - left) / (right - left);
    return String(BigInt(figure.dataset.origin) + BigInt(Math.round(us * 1000)));
  };
  let from = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    from = at(event);
    svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  svg.addEventListener("pointermove", (event) => { if (from !== null) span(svg, "dragged")(from, at(event)); });
  svg.addEventListener("pointercancel", () => {
    from = null;
    svg.querySelector(".dragged")?.remove();
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [begin, end] = [from, at(event)].sort((a, b) => a - b);
    from = null;
    choose(end - begin < least ? {at: time(end)} : {t0: time(begin), t1: time(end)});
  });
}
if (curves.length) document.getElementById("memory-how").hidden = false;

const mark = (event) => {
  document.querySelectorAll("rect.block-time").forEach((rect) => rect.remove());
  const row = [event.target, document.activeElement].map((each) => each?.closest?.("tr[data-curve]")).find(Boolean);
  const figure = row && curves.find((each) => each.dataset.curve === row.dataset.curve);
  if (!figure) return;
  const svg = figure.querySelector("svg");
  const {first, last, left, right} = placeOf(svg);
  const [from, until] = [row.dataset.from || first, row.dataset.until || last].map((us) => {
    const inside = Math.min(Math.max(Number(us), first), last);
    return left + (right - left) * (inside - first) / (last - first);
  });
  span(svg, "block-time")(from, until);
};
document.addEventListener("pointerover", mark);
document.addEventListener("focusin", mark);

// One row of the blocks is in the order of the Tab key; arrow keys go to the rows above and below it.
const rows = () => [...document.querySelectorAll("tr[data-curve]")].filter((row) => !row.hidden);
document.querySelectorAll("tr[data-curve]").forEach((row, place) => { row.tabIndex = place ? -1 : 0; });
document.addEventListener("keydown", (event) => {
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (!step || !event.target.matches("tr[data-curve]")) return;
  event.preventDefault();
  const shown = rows();
  const next = shown[shown.indexOf(event.target) + step];
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
