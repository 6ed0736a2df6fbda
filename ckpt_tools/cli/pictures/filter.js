"use strict";
// Chooses tensors by words in their names. All else of a page works without a script.
const byId = (id) => document.getElementById(id);
const field = byId("filter");
const rows = Array.from(document.querySelectorAll("details.row"), (row) => {
  const list = row.querySelector(".names");
  const names = (list || row.querySelector(".name")).textContent.split("\n");
  return { row, list, names, lower: names.map((name) => name.toLowerCase()) };
});

function choose() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  for (const { row, list, names, lower } of rows) {
    const hits = names.filter((_, place) => words.every((word) => lower[place].includes(word)));
    row.hidden = hits.length === 0;
    if (list) list.textContent = hits.join("\n");
    found += hits.length;
  }
  const all = rows.reduce((sum, { names }) => sum + names.length, 0);
  byId("count").textContent = `${found.toLocaleString("en")} of ${all.toLocaleString("en")} tensors`;
  byId("nothing").hidden = found > 0;
}

if (field) {
  byId("tools").hidden = false;
  byId("open").addEventListener("click", () => rows.forEach(({ row }) => { row.open = true; }));
  byId("close").addEventListener("click", () => rows.forEach(({ row }) => { row.open = false; }));
  field.addEventListener("input", choose);
  field.value = new URLSearchParams(location.hash.slice(1)).get("q") || "";
  choose();
}
document.documentElement.dataset.ready = Math.round(performance.now());
