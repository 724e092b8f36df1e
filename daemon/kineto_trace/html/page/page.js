"use strict";
// The rows of a table as nodes, those of a tree below the row that has them; other rows have no depth.
const nodes = (table) => {
  const [outermost, open] = [[], []];
  for (const row of table.tBodies[0].rows) {
    const [node, depth] = [{row, below: []}, Number(row.dataset.depth ?? 0)];
    (open[depth - 1]?.below ?? outermost).push(node);
    open.splice(depth, Infinity, node);
  }
  return outermost;
};
const fold = (node) => node.row.querySelector("button.fold");
// Shows the rows that have the text, and those that they are below; without a text, what is not folded.
const show = (table, wanted) => {
  const walk = (siblings, shown) => siblings.map((node) => {
    const inside = walk(node.below, shown && fold(node)?.ariaExpanded !== "false");
    const found = inside || node.row.textContent.toLowerCase().includes(wanted);
    node.row.hidden = wanted ? !found : !shown;
    return found;
  }).includes(true);
  walk(nodes(table), true);
};
const unfold = (table, buttons, shown) => {
  for (const button of buttons) button.ariaExpanded = shown;
  show(table, "");
  const search = table.closest(".table").querySelector("input[type=search]");
  if (search) search.value = "";
};
const folding = (table) => {
  const walk = (siblings) => siblings.forEach((node) => {
    if (!node.below.length) return;
    const name = node.row.querySelector(".branch span");
    const button = document.createElement("button");
    Object.assign(button, {type: "button", className: "fold", ariaExpanded: true});
    button.ariaLabel = `Rows below ${name.textContent}`;
    name.before(button);
    walk(node.below);
  });
  walk(nodes(table));
  table.classList.add("folds");
  for (const [text, shown] of [["Fold all", false], ["Unfold all", true]]) {
    const button = document.createElement("button");
    Object.assign(button, {type: "button", className: "fold-all", textContent: text});
    button.addEventListener("click", () => unfold(table, table.querySelectorAll("button.fold"), shown));
    table.closest(".scroll").before(button);
  }
};
for (const row of document.querySelectorAll("tbody > tr[data-depth]:first-child")) folding(row.closest("table"));
const sort = (title) => {
  const table = title.closest("table");
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
  const arrange = (siblings) => siblings.sort((first, second) => {
    const [a, b] = [value(first.row), value(second.row)];
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return a < b ? -sign : a > b ? sign : 0;
  }).forEach((node) => {
    table.tBodies[0].append(node.row);
    arrange(node.below);
  });
  arrange(nodes(table));
};
document.addEventListener("click", (event) => {
  const title = event.target.closest("thead th");
  if (title) sort(title);
  const button = event.target.closest("button.fold");
  if (button) unfold(button.closest("table"), [button], button.ariaExpanded === "false");
  const row = event.target.closest("a, button") ? null : event.target.closest("tr");
  row?.querySelector("a.inside")?.click();
  const text = event.target.closest("td.long > div");
  if (text) text.classList.toggle("whole");  // three lines of it, or all
});
document.addEventListener("keydown", (event) => {
  const folds = {ArrowLeft: "true", ArrowRight: "false"}[event.key];
  if (event.target.matches("button.fold") && event.target.ariaExpanded === folds) event.target.click();
});
document.addEventListener("input", (event) => {
  const table = event.target.matches("input[type=search]") && event.target.parentElement.querySelector("table");
  if (!table) return;
  show(table, event.target.value.toLowerCase());
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
