"use strict";
// Draws the pieces of a tensor, and says on hovering what they are. `layout.js` draws all the rest.
const started = performance.now();
const BANDS = 4;
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
