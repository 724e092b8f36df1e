"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const value = (row, place) => {
    const cell = row.cells[place];
    return cell.classList.contains("number") ? parseFloat(cell.dataset.value) : cell.textContent;
  };
  table.querySelectorAll("th").forEach((title, place) => title.addEventListener("click", () => {
    const down = title.ariaSort !== "descending";
    table.querySelectorAll("th").forEach((other) => { other.ariaSort = null; });
    title.ariaSort = down ? "descending" : "ascending";
    const sign = down ? -1 : 1;
    const missing = (entry) => typeof entry === "number" && Number.isNaN(entry);
    [...body.rows].sort((first, second) => {
      const [a, b] = [value(first, place), value(second, place)];
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      return a < b ? -sign : a > b ? sign : 0;
    }).forEach((row) => body.append(row));
  }));
  const filter = table.parentElement.querySelector("input");
  if (filter) filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

const explanation = document.getElementById("explanation");
let explained = null;  // the figure whose explanation is shown
const place = () => {
  const [at, size] = [explained.getBoundingClientRect(), explanation.getBoundingClientRect()];
  const right = document.documentElement.clientWidth - size.width - 8;
  const above = at.top - size.height - 6;
  explanation.style.left = `${Math.max(8, Math.min(at.left, right))}px`;
  explanation.style.top = `${above > 8 ? above : at.bottom + 6}px`;
};
const hide = () => {
  explained = null;
  explanation.hidden = true;
};
const explain = (figure) => {
  const line = (name, text) => {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  };
  explained = figure;
  explanation.replaceChildren(
    line("b", figure.textContent.trim()),
    line("small", figure.dataset.unit),
    line("p", figure.dataset.meaning),
    line("code", `kinetoctl report --describe --view ${figure.dataset.figure}`),
  );
  explanation.hidden = false;
  place();
};
for (const figure of document.querySelectorAll("button.about")) {
  figure.addEventListener("focus", () => explain(figure));
  figure.addEventListener("blur", hide);
}
document.addEventListener("click", (event) => {
  const figure = event.target.closest("button.about");
  if (figure) explain(figure); else hide();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", () => { if (explained) place(); }, {capture: true, passive: true});
