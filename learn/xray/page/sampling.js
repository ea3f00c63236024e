// From logits to a token, by the rules of reference/sampling.py, in float64.
"use strict";

function softmax(x) {
  const top = x.reduce((a, b) => Math.max(a, b), -Infinity);
  return normalized(Float64Array.from(x, (value) => Math.exp(value - top)));
}

function normalized(p) {
  const total = p.reduce((a, b) => a + b, 0);
  return p.map((value) => value / total);
}

// At a temperature of 0, all of it is on the largest logit, the first on ties.
function temper(logits, temperature) {
  if (temperature === 0) {
    const best = logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
    return Float64Array.from(logits, (_, i) => (i === best ? 1 : 0));
  }
  const top = logits.reduce((a, b) => Math.max(a, b));
  return softmax(Float64Array.from(logits, (value) => (value - top) / temperature));
}

function keep(p, kept) {
  return normalized(p.map((value) => (kept(value) ? value : 0)));
}

function keepTopK(p, k) {
  if (k === 0 || k >= p.length) return p;
  const least = Float64Array.from(p).sort().at(-k);
  return keep(p, (value) => value >= least);
}

// A token stays if those more probable than it hold less than `topP` together.
function keepTopP(p, topP) {
  if (topP >= 1) return p;
  const before = new Map(); // mass ahead of the first token of each probability
  let total = 0;
  for (const value of Float64Array.from(p).sort().reverse()) {
    total += value;
    if (!before.has(value)) before.set(value, total - value);
  }
  return keep(p, (value) => before.get(value) < topP);
}

function keepMinP(p, minP) {
  const least = minP * p.reduce((a, b) => Math.max(a, b));
  return keep(p, (value) => value >= least);
}

function distribution(logits, { temperature, topK, topP, minP }) {
  return keepMinP(keepTopP(keepTopK(temper(logits, temperature), topK), topP), minP);
}

// The first token at which the cumulative distribution exceeds u.
function draw(p, u) {
  const total = p.reduce((a, b) => a + b, 0);
  let sum = 0;
  return p.findIndex((value) => (sum += value) > u * total);
}

const FILTERS = { temperature: 0.8, topK: 0, topP: 0.95, minP: 0, u: 0.5 };
const BARS = 16;

function buildSampling() {
  const two = (value) => value.toFixed(2);
  const control = (name, label, range, text, hint) =>
    slider(label, { ...range, value: FILTERS[name], hint }, text, (value) => {
      FILTERS[name] = value;
      drawSampling(XRAY.chosen, XRAY.tokens[XRAY.chosen.token]);
    });
  fill("filters",
    control("temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, two, "0 takes the likeliest token"),
    control("topK", "Top-k", { min: 0, max: Math.min(XRAY.model.config.vocab, 40), step: 1 }, (k) => (k ? String(k) : "off"), "so many likeliest tokens"),
    control("topP", "Top-p", { min: 0.05, max: 1, step: 0.01 }, (p) => (p < 1 ? two(p) : "off"), "the likeliest that together reach this"),
    control("minP", "Min-p", { min: 0, max: 1, step: 0.01 }, (p) => (p ? two(p) : "off"), "this share of the likeliest at least"),
    control("u", "Random number", { min: 0, max: 0.99, step: 0.01 }, two, "a token is drawn where the sum passes it"));
}

function drawSampling({ token: position }, data) {
  const logits = unpack(data.logits);
  const [plain, p] = [temper(logits, 1), distribution(logits, FILTERS)];
  const chosen = draw(p, FILTERS.u);
  const names = new Map(data.likely.map(({ id, text }) => [id, text]));
  const shown = data.likely.slice(0, BARS).map(({ id }) => id);
  const kept = p.reduce((count, value) => count + (value > 0), 0);
  const most = Math.max(...shown.map((id) => Math.max(p[id], plain[id])));
  document.getElementById("next-lead").replaceChildren(
    "After ", el("q", {}, token(XRAY.model.tokens[position].text)), ` the model gives each of its ${p.length.toLocaleString("en")} tokens a probability. Filters shape them, in this order; then one is drawn.`);
  fill("distribution",
    el("ol", { class: "odds" }, ...shown.map((id) => el("li", { class: `${p[id] ? "" : "dropped"} ${id === chosen ? "drawn" : ""}`, "data-id": id, "data-p": p[id] },
      el("span", { class: "name" }, token(names.get(id))),
      el("span", { class: "track", "aria-hidden": "true" },
        el("span", { class: "was", style: `width: ${(100 * plain[id]) / most}%` }),
        el("span", { class: "is", style: `width: ${(100 * p[id]) / most}%` })),
      el("span", { class: "p" }, p[id] ? percent(p[id]) : "dropped"), id === chosen ? el("span", { class: "hidden" }, ", drawn") : ""))),
    el("p", { "aria-live": "polite" }, `${kept.toLocaleString("en")} of ${p.length.toLocaleString("en")} tokens can be drawn. Drawn: `,
      el("q", { id: "drawn", "data-id": chosen }, names.has(chosen) ? token(names.get(chosen)) : `token ${chosen}`), "."));
}
