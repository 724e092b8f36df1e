// Frames and lines of Python, such as /job/train.py(12): run, become links to the editor that the user chose.
const {editor} = document.body.dataset;
const PLACE = /(?<![^\s"'(,;])(\/(?!\/)[^\s:;()<>"'|\\]+\.pyx?)(?:\((\d{1,9})\)|:(\d{1,9})(?!\d))/g;

const address = (path, line) => {
  const encoded = path.split("/").map(encodeURIComponent).join("/");
  return editor.split("{path}").join(encoded).split("{line}").join(line);
};

const link = (text, path, line) => {
  const made = document.createElement("a");
  made.href = address(path, line);
  made.textContent = text;
  made.title = "Open in the editor";
  return made;
};

const linked = (node) => {
  const text = node.data;
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(PLACE)) {
    parts.push(text.slice(end, match.index), link(match[0], match[1], match[2] ?? match[3]));
    end = match.index + match[0].length;
  }
  if (parts.length) node.replaceWith(...parts, text.slice(end));
};

// Cells and stacks that hold the place in one text.
for (const place of document.querySelectorAll("main td, main .stack code, main .evidence")) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) if (!walker.currentNode.parentElement.closest("a")) nodes.push(walker.currentNode);
  nodes.forEach(linked);
}

// Places that are shown with a short path, and have the whole one as their title.
for (const place of document.querySelectorAll("main .place")) {
  const [match] = place.title.matchAll(PLACE);
  if (match) place.replaceChildren(link(place.textContent, match[1], match[2] ?? match[3]));
}

// Tables with a column for the file and perhaps one for the line.
for (const table of document.querySelectorAll("main table")) {
  const figures = [...table.querySelectorAll("thead th")].map((title) => title.querySelector("[data-figure]")?.dataset.figure ?? "");
  const [file, line] = [".file", ".line"].map((name) => figures.findIndex((figure) => figure.endsWith(name)));
  if (file < 0) continue;
  for (const {cells} of table.tBodies[0].rows) {
    const path = cells[file].querySelector(".place")?.title ?? cells[file].textContent;
    const number = line < 0 ? "" : cells[line].textContent.replace(/\D/g, "");
    if (/^\/(?!\/)[^\\]+\.pyx?$/.test(path)) cells[file].replaceChildren(link(cells[file].textContent, path, number || "1"));
  }
}
