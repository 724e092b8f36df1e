"use strict";
const sort = (title) => {
  const body = title.closest("table").tBodies[0];
  const place = title.cellIndex;
  const value = (row) => {
    const cell = row.cells[place];
    if (!cell.classList.contains("number")) return cell.textContent;
    return parseFloat(cell.dataset.value ?? cell.textContent.replace(/[<>,]/g, ""));
  };
  const down = title.ariaSort !== "descending";
  for (const other of title.parentElement.cells) other.ariaSort = null;
  title.ariaSort = down ? "descending" : "ascending";
  const sign = down ? -1 : 1;
  const missing = (entry) => typeof entry === "number" && Number.isNaN(entry);
  [...body.rows].sort((first, second) => {
    const [a, b] = [value(first), value(second)];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return a < b ? -sign : a > b ? sign : 0;
  }).forEach((row) => body.append(row));
};
document.addEventListener("click", (event) => {
  const title = event.target.closest("thead th");
  if (title) sort(title);
  const row = event.target.closest("a, button") ? null : event.target.closest("tr");
  row?.querySelector("a.inside")?.click();
  const text = event.target.closest("td.long > div");
  if (text) text.classList.toggle("whole");  // three lines of it, or all
});
document.addEventListener("input", (event) => {
  const table = event.target.matches("input[type=search]") && event.target.parentElement.querySelector("table");
  if (!table) return;
  const wanted = event.target.value.toLowerCase();
  for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
});

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
    line("p", figure.title),
    line("code", `kinetoctl report --describe --view ${figure.dataset.figure}`),
  );
  explanation.hidden = false;
  place();
};
document.addEventListener("focusin", (event) => { if (event.target.matches("button.about")) explain(event.target); });
document.addEventListener("focusout", (event) => { if (event.target.matches("button.about")) hide(); });
document.addEventListener("click", (event) => {
  const figure = event.target.closest("button.about");
  if (figure) explain(figure); else hide();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
document.addEventListener("scroll", () => { if (explained) place(); }, {capture: true, passive: true});
