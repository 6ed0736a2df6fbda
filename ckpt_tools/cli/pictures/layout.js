"use strict";
// Draws the list of tensors. Only rows that can be seen are in the document: there may be 100,000.
const started = performance.now();
const ROW = 26, OPENED = 60, BANDS = 4;
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, style, text) => {
  const made = document.createElement(tag);
  if (style) made.className = style;
  if (text !== undefined) made.textContent = text;
  return made;
};
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

const names = data.names === "" ? [] : data.names.split("\n");
const sides = data.sides;
const fill = (holder) => (holder === null ? "#8886" : data.colors[holder % data.colors.length]);
const ink = (holder) => data.inks[holder % data.inks.length];

function bytes(count) {
  if (count < 1000) return `${count} B`;
  const units = ["KB", "MB", "GB", "TB", "PB"];
  let place = -1;
  while (count >= 1000 && place < units.length - 1) { count /= 1000; place += 1; }
  return `${count.toFixed(count < 10 ? 2 : count < 100 ? 1 : 0)} ${units[place]}`;
}

function spans(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && number === last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([a, b]) => (a === b ? a : `${a}-${b}`)).join(",");
}

const numel = (sizes) => sizes.reduce((product, size) => product * size, 1);
const dtype = (tensor) => data.dtypes[data.dtype[tensor]];
const kindOf = (side, tensor) => (side.kind[tensor] < 0 ? null : side.kinds[side.kind[tensor]]);
const shapeOf = (tensor) => kindOf(sides[0], tensor).shape;
const nbytes = (tensor) => numel(shapeOf(tensor)) * dtype(tensor)[1];

// ------------------------------------------------------------------ where pieces lie, from 0 to 1

function rects(kind) {
  if (kind.rects) return kind.rects;
  const { shape, pieces } = kind;
  const dims = shape.map((size, dim) => dim)
    .filter((dim) => pieces.some((piece) => piece[1][dim] !== shape[dim]));
  const span = (piece, dim) =>
    dim === undefined ? [0, 1] : [piece[0][dim] / shape[dim], piece[1][dim] / shape[dim]];
  const total = pieces.reduce((sum, piece) => sum + numel(piece[1]), 0);
  let start = 0;
  kind.rects = [];
  for (const piece of pieces) {
    let [x, width] = span(piece, dims.length === 2 ? dims[1] : dims[0]);
    let [y, height] = span(piece, dims.length === 2 ? dims[0] : undefined);
    if (dims.length > 2) {
      [x, width, y, height] = [start / total, numel(piece[1]) / total, 0, 1];
      start += numel(piece[1]);
    }
    const bands = piece[2].length ? piece[2].slice(0, BANDS) : [null];
    bands.forEach((holder, band) => kind.rects.push({
      x, width, y: y + (height * band) / bands.length, height: height / bands.length, piece, holder,
    }));
  }
  return kind.rects;
}

function paint(canvas, found) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "10px ui-monospace, Menlo, Consolas, monospace";
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const rect of found) {
    const x = rect.x * width, y = rect.y * height;
    const gap = rect.width * width > 3 ? 1 : 0;
    const wide = rect.width * width - gap, high = rect.height * height - (height > 40 ? 1 : 0.5);
    pen.fillStyle = fill(rect.holder);
    pen.fillRect(x, y, Math.max(wide, 0.5), Math.max(high, 0.5));
    const text = rect.holder === null ? "?" : String(rect.holder);
    if (wide > 7 * text.length + 4 && high > 10) {
      pen.fillStyle = rect.holder === null ? "#111" : ink(rect.holder);
      pen.fillText(text, x + wide / 2, y + high / 2 + 0.5);
    }
  }
}

const hit = (found, x, y) => found.find((rect) =>
  x >= rect.x && x < rect.x + rect.width && y >= rect.y && y < rect.y + rect.height);

// ------------------------------------------------------------------------------- tips on hovering

const tip = byId("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const above = event.clientY + 20 + tip.offsetHeight > innerHeight;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}

function hoverable(element, words) {
  element.addEventListener("mousemove", (event) => showTip(event, words(event)));
  element.addEventListener("mouseleave", () => { tip.style.display = "none"; });
}

function boxText(piece) {
  return `[${piece[0].map((start, dim) => `${start}:${start + piece[1][dim]}`).join(", ")}]`;
}

function pieceText(side, tensor, piece) {
  const lines = [names[tensor], `box ${boxText(piece)}`];
  if (side.unit === "rank") {
    const many = piece[2].length > 1;
    lines.push(`${many ? "ranks" : "rank"} ${spans(piece[2]) || "unknown"}`);
  }
  if (piece[3] !== null) lines.push(`file ${side.files[piece[3]]}`);
  lines.push(`${(numel(piece[1]) * dtype(tensor)[1]).toLocaleString("en")} bytes`);
  return lines.join("\n");
}

function pieceBar(side, tensor) {
  const kind = kindOf(side, tensor);
  const canvas = make("canvas");
  canvas.found = kind ? rects(kind) : [];
  hoverable(canvas, (event) => {
    const place = canvas.getBoundingClientRect();
    const x = (event.clientX - place.left) / place.width;
    const rect = hit(canvas.found, x, (event.clientY - place.top) / place.height);
    return rect ? pieceText(side, tensor, rect.piece) : "";
  });
  return canvas;
}

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
