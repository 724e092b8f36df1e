"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const value = (row, place) => {
    const cell = row.cells[place];
    return cell.classList.contains("number") ? parseFloat(cell.dataset.value) : cell.textContent;
  };
  table.querySelectorAll("th").forEach((title, place) => title.addEventListener("click", () => {
    const down = !title.classList.contains("down");
    table.querySelectorAll("th").forEach((other) => other.classList.remove("up", "down"));
    title.classList.add(down ? "down" : "up");
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
