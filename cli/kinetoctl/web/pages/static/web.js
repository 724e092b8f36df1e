// Lists that change: the server's page is fetched again, and the part that is marked takes the new one's nodes.
const refresh = async (place) => {
  const answer = await fetch(location.href, {credentials: "same-origin"});
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]");
  if (!fresh) return location.reload();
  if (place.contains(document.activeElement) && document.activeElement !== place) return;
  const filter = place.querySelector("input[type=search]")?.value;
  if (filter) return;
  const titles = [...place.querySelectorAll("thead th")];
  const sorted = titles.findIndex((title) => title.ariaSort);
  const clicks = sorted < 0 ? 0 : titles[sorted].ariaSort === "descending" ? 1 : 2;
  place.replaceChildren(...fresh.childNodes);
  for (let click = 0; click < clicks; click++) place.querySelectorAll("thead th")[sorted].click();
};

for (const place of document.querySelectorAll("[data-live]")) {
  setInterval(() => {
    if (!document.hidden) refresh(place).catch(() => {});  // a server that has ended: the page stays as it is
  }, Number(place.dataset.live));
}

for (const field of document.querySelectorAll("details input[type=search]")) {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const list of field.closest("details").querySelectorAll("ul")) {
      for (const item of list.children) item.hidden = !words.every((word) => item.textContent.toLowerCase().includes(word));
      list.hidden = list.previousElementSibling.hidden = [...list.children].every((item) => item.hidden);
    }
  });
}

for (const area of document.querySelectorAll(".sql textarea")) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) area.form.requestSubmit();
  });
}
