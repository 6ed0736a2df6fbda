"use strict";
// Draws the list of tensors. Only rows that can be seen are in the document: there may be 100,000.
const ROW = 26, OPENED = 60;

// -------------------------------------------------------------------------- the tree of the names

function grow() {
  const root = { children: new Map(), tensor: -1, path: "" };
  names.forEach((name, tensor) => {
    let node = root;
    for (const part of name.split(".")) {
      let next = node.children.get(part);
      if (!next) {
        next = { children: new Map(), tensor: -1, path: node.path ? `${node.path}.${part}` : part };
        node.children.set(part, next);
      }
      node = next;
    }
    node.tensor = tensor;
  });
  return settle(root, "", -1, []);
}

const numberFirst = (a, b) => {
  const x = /^\d+$/.test(a[0]), y = /^\d+$/.test(b[0]);
  if (x && y) return Number(a[0]) - Number(b[0]);
  return x !== y ? (x ? -1 : 1) : a[0] < b[0] ? -1 : 1;
};

// Sorts children, joins parts that have one part below them, and numbers the leaves in order.
function settle(node, label, depth, leaves) {
  while (node.children.size === 1 && node.tensor < 0 && depth >= 0) {
    const [[part, only]] = node.children;
    label = `${label}.${part}`;
    node = only;
  }
  const settled = { label, depth, tensor: node.tensor, path: node.path, open: false, leaves };
  settled.first = leaves.length;
  if (node.tensor >= 0) leaves.push(node.tensor);
  settled.children = [...node.children].sort(numberFirst)
    .map(([part, child]) => settle(child, part, depth + 1, leaves));
  settled.end = leaves.length;
  return settled;
}

const isGroup = (node) => node.children.length > 0;

function openSome(root) {
  let count = root.children.length, level = root.children;
  root.open = true;
  while (level.length) {
    const next = [];
    for (const node of level) {
      if (!isGroup(node) || count + node.children.length > OPENED) continue;
      node.open = true;
      count += node.children.length;
      next.push(...node.children);
    }
    level = next;
  }
}

// How many bytes each holder has of all tensors in a group.
function groupRects(side, node) {
  const counts = new Map();
  for (let place = node.first; place < node.end; place += 1) {
    const tensor = node.leaves[place];
    const key = `${side.kind[tensor]},${dtype(tensor)[1]}`;
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  const totals = new Map();
  for (const [key, count] of counts) {
    const [number, itemsize] = key.split(",").map(Number);
    if (number < 0) continue;
    for (const piece of side.kinds[number].pieces) {
      const share = numel(piece[1]) * itemsize * count;
      for (const holder of piece[2]) totals.set(holder, (totals.get(holder) || 0) + share);
    }
  }
  const sum = [...totals.values()].reduce((a, b) => a + b, 0) || 1;
  let x = 0;
  return [...totals].sort((a, b) => a[0] - b[0]).map(([holder, total]) => {
    const rect = { x, y: 0, width: total / sum, height: 1, holder, total };
    x += rect.width;
    return rect;
  });
}

function groupBar(side, node, number) {
  const canvas = make("canvas");
  node.bars = node.bars || [];
  node.bars[number] = node.bars[number] || groupRects(side, node);
  canvas.found = node.bars[number];
  hoverable(canvas, (event) => {
    const place = canvas.getBoundingClientRect();
    const rect = hit(canvas.found, (event.clientX - place.left) / place.width, 0.5);
    if (!rect) return "";
    const who = side.unit === "rank" ? `rank ${rect.holder}` : side.files[rect.holder];
    return `${node.path}\n${who}\n${rect.total.toLocaleString("en")} bytes`;
  });
  return canvas;
}

// ---------------------------------------------------------------------------------------- the list

const list = byId("list");
const root = grow();
let shown = [];
let words = [];

function flatten(node, into) {
  for (const child of node.children) {
    into.push(child);
    if (child.open) flatten(child, into);
    else continue;
  }
  return into;
}

function refresh() {
  if (words.length) {
    const lower = data.lower || (data.lower = names.map((name) => name.toLowerCase()));
    shown = root.leaves.filter((tensor) => words.every((word) => lower[tensor].includes(word)))
      .map((tensor) => ({ label: names[tensor], depth: 0, tensor, children: [] }));
    byId("count").textContent =
      `${shown.length.toLocaleString("en")} of ${names.length.toLocaleString("en")} tensors`;
  } else {
    shown = flatten(root, []);
    byId("count").textContent = `${names.length.toLocaleString("en")} tensors`;
  }
  list.style.height = `${shown.length * ROW}px`;
  drawn.clear();
  list.replaceChildren();
  draw();
}

const drawn = new Map();

// Puts the rows that can be seen into the document, and takes the others out.
function draw() {
  const top = -list.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(top / ROW) - 8);
  const end = Math.min(shown.length, Math.ceil((top + innerHeight) / ROW) + 8);
  for (const [place, row] of drawn) {
    if (place < first || place >= end) { row.remove(); drawn.delete(place); }
  }
  const fresh = [];
  for (let place = first; place < end; place += 1) {
    if (drawn.has(place)) continue;
    const row = rowOf(shown[place]);
    row.style.top = `${place * ROW}px`;
    drawn.set(place, row);
    fresh.push(row);
  }
  list.append(...fresh);
  for (const row of fresh) {
    for (const canvas of row.querySelectorAll("canvas")) paint(canvas, canvas.found);
  }
}

function rowOf(node) {
  const row = make("div", isGroup(node) ? "row group" : "row");
  row.tabIndex = 0;
  const name = make("span");
  name.style.paddingLeft = `${node.depth * 16 + (isGroup(node) ? 0 : 16)}px`;
  if (isGroup(node)) name.append(node.open ? "▾ " : "▸ ");
  name.append(...marked(node.label));
  name.title = node.path || node.label;
  row.append(name, ...(isGroup(node) ? groupCells(node) : tensorCells(node.tensor)));
  const act = () => (isGroup(node) ? toggle(node) : detail(node.tensor));
  row.addEventListener("click", act);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
  return row;
}

function marked(text) {
  const word = words[0];
  const place = word ? text.toLowerCase().indexOf(word) : -1;
  if (place < 0) return [text];
  const end = place + word.length;
  return [text.slice(0, place), make("mark", "", text.slice(place, end)), text.slice(end)];
}

function tensorCells(tensor) {
  const moved = data.moved ? [make("span", "n", bytes(data.moved[tensor]))] : [];
  return [
    make("span", "quiet", `[${shapeOf(tensor).join(",")}] ${dtype(tensor)[0]}`),
    make("span", "n", bytes(nbytes(tensor))),
    ...sides.map((side) => pieceBar(side, tensor)),
    ...moved,
  ];
}

function groupCells(node) {
  let total = 0, moves = 0;
  for (let place = node.first; place < node.end; place += 1) {
    total += nbytes(node.leaves[place]);
    if (data.moved) moves += data.moved[node.leaves[place]];
  }
  const count = node.end - node.first;
  return [
    make("span", "quiet", `${count.toLocaleString("en")} ${count === 1 ? "tensor" : "tensors"}`),
    make("span", "n", bytes(total)),
    ...sides.map((side, number) => groupBar(side, node, number)),
    ...(data.moved ? [make("span", "n", bytes(moves))] : []),
  ];
}

function toggle(node) {
  node.open = !node.open;
  refresh();
}

function openAll(node, open) {
  if (isGroup(node) && node !== root) node.open = open;
  node.children.forEach((child) => openAll(child, open));
}

// ------------------------------------------------------------------------------------- one tensor

const panel = byId("detail");

function detail(tensor) {
  const close = make("button", "", "close");
  close.addEventListener("click", closeDetail);
  panel.replaceChildren(close, make("h2", "mono", names[tensor]));
  panel.append(make("p", "quiet",
    `[${shapeOf(tensor).join(", ")}] ${dtype(tensor)[0]}, ${nbytes(tensor).toLocaleString("en")} bytes`));
  panel.style.display = "block";
  for (const side of sides) {
    const kind = kindOf(side, tensor);
    if (!kind) continue;
    if (sides.length > 1) panel.append(make("h2", "", side.title));
    if (kind.words) panel.append(make("p", "quiet", kind.words));
    const canvas = pieceBar(side, tensor);
    panel.append(canvas);
    paint(canvas, canvas.found);
    panel.append(pieceTable(side, tensor, kind));
  }
  panel.querySelector("button").focus();
}

function pieceTable(side, tensor, kind) {
  const table = make("table", "mono");
  const head = table.createTHead().insertRow();
  for (const text of [`${side.unit}s`, "box", "bytes", "file"]) {
    head.append(make("th", text === "bytes" ? "n" : "", text));
  }
  const body = table.createTBody();
  for (const piece of kind.pieces.slice(0, 256)) {
    const row = body.insertRow();
    row.append(
      make("td", "", spans(piece[2]) || "?"),
      make("td", "", boxText(piece)),
      make("td", "n", (numel(piece[1]) * dtype(tensor)[1]).toLocaleString("en")),
      make("td", "", piece[3] === null ? "-" : side.files[piece[3]]),
    );
  }
  if (kind.pieces.length > 256) {
    body.insertRow().append(make("td", "quiet", `and ${kind.pieces.length - 256} more`));
  }
  return table;
}

function closeDetail() { panel.style.display = "none"; }

// ------------------------------------------------------------------------ mesh and bytes per rank

function meshOf(side) {
  const { shape, names: dims } = side.mesh;
  const across = shape.length ? shape[shape.length - 1] : 1;
  const down = shape.length > 2 ? shape[shape.length - 2] : 0;
  const grid = make("div", "mesh");
  grid.style.gridTemplateColumns = `repeat(${across}, max-content)`;
  for (let rank = 0; rank < Math.min(numel(shape), 4096); rank += 1) {
    if (down && rank && rank % (across * down) === 0) grid.append(make("b"));
    const cell = make("i", "", rank);
    cell.style.background = fill(rank);
    cell.style.color = ink(rank);
    hoverable(cell, () => placeText(shape, dims, rank));
    grid.append(cell);
  }
  return grid;
}

function placeText(shape, dims, rank) {
  let rest = rank;
  const places = [...shape].reverse().map((size) => {
    const index = rest % size;
    rest = Math.floor(rest / size);
    return index;
  }).reverse();
  return [`rank ${rank}`, ...places.map((index, dim) => `${dims[dim]}=${index}`)].join("\n");
}

function loadsOf(side) {
  const most = Math.max(...side.loads, 1);
  const bars = make("div", "loads");
  side.loads.forEach((load, holder) => {
    const bar = make("i");
    bar.style.height = `${Math.max(1, (100 * load) / most)}%`;
    bar.style.background = fill(holder);
    const who = side.unit === "rank" ? `rank ${holder}` : side.files[holder];
    const gets = side.gets ? `\n${side.gets[holder].toLocaleString("en")} of them move here` : "";
    hoverable(bar, () => `${who}\n${load.toLocaleString("en")} bytes${gets}`);
    bars.append(bar);
  });
  return bars;
}

function drawSides() {
  for (const side of sides) {
    const box = make("section");
    if (sides.length > 1) box.append(make("h2", "", side.title));
    if (side.mesh) box.append(make("h2", "", side.mesh.words), meshOf(side));
    box.append(make("h2", "", side.loadWords), loadsOf(side));
    byId("sides").append(box);
  }
}

// ------------------------------------------------------------------------------------------ begin

function search(text) {
  words = text.toLowerCase().split(/\s+/).filter(Boolean);
  refresh();
}

let waiting = 0;
byId("search").addEventListener("input", (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => search(event.target.value), 80);
});
byId("open").addEventListener("click", () => { openAll(root, true); refresh(); });
byId("close").addEventListener("click", () => { openAll(root, false); refresh(); });
addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
addEventListener("resize", refresh);
addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeDetail();
  if (event.key === "/" && document.activeElement !== byId("search")) {
    event.preventDefault();
    byId("search").focus();
  }
});
if (sides.length > 1) document.body.classList.add("two");
drawSides();
openSome(root);
const asked = new URLSearchParams(location.hash.slice(1));
byId("search").value = asked.get("q") || "";
search(byId("search").value);
if (asked.has("tensor")) detail(names.indexOf(asked.get("tensor")));
document.documentElement.dataset.ready = Math.round(performance.now() - started);
