// A drawing whose items can be read: by pointer, and by arrow keys once it has the focus.
"use strict";

// `draw(context, width, height, marked, colors)` paints, `at(x, y, width, height)` gives the item below a point or -1,
// `tell(item)` says in words what it is, and `step` is how far up and down move.
function chart({ label, height, count, draw, at, tell, step = 1, width = null }) {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": `${label}. Arrow keys read its numbers.` });
  const said = el("output", { class: "reading" }, "\u00a0");
  let marked = -1;

  function paint() {
    const box = canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(box.width * scale);
    canvas.height = Math.round(box.height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, box.width, box.height);
    draw(context, box.width, box.height, marked, colors());
  }

  function mark(item) {
    if (item === marked) return;
    marked = item;
    said.textContent = item < 0 ? "\u00a0" : tell(item);
    paint();
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    mark(at(event.clientX - box.left, event.clientY - box.top, box.width, box.height));
  });
  canvas.addEventListener("pointerleave", () => mark(-1));
  canvas.addEventListener("blur", () => mark(-1));
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -step, ArrowDown: step, Home: -count, End: count }[event.key];
    if (!move) return;
    event.preventDefault();
    mark(marked < 0 ? 0 : Math.max(0, Math.min(count - 1, marked + move)));
  });
  canvas.style.height = `${height}px`;
  if (width) canvas.style.width = `${width}px`;
  new ResizeObserver(paint).observe(canvas);
  DARK.addEventListener("change", paint);
  return el("div", { class: "chart" }, canvas, said);
}

const DARK = window.matchMedia("(prefers-color-scheme: dark)");

function colors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.fromEntries(["ink", "faint", "line", "cell", "accent", "warm", "plus", "minus"].map((n) => [n, read(n)]));
}

function rgba(triple, alpha) {
  return `rgb(${triple} / ${alpha})`;
}
