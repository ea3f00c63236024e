// Rotary positions: pairs as turning arrows, two layouts, and the score against the distance.
"use strict";

// (a, b) turned by position × frequency, for each pair; `pair(i)` names its two features.
function turned(x, position, frequencies, pair) {
  const y = Float64Array.from(x);
  frequencies.forEach((f, i) => {
    const [first, second] = pair(i, x.length);
    const [cos, sin] = [Math.cos(position * f), Math.sin(position * f)];
    y[first] = x[first] * cos - x[second] * sin;
    y[second] = x[second] * cos + x[first] * sin;
  });
  return y;
}

const PAIRINGS = {
  halves: (i, d) => [i, i + d / 2],
  interleaved: (i) => [2 * i, 2 * i + 1],
};

// A vector whose pairs are halves, for use with interleaved pairs.
function interleave(x) {
  return Float64Array.from(x, (_, i) => x[(i >> 1) + (i % 2) * (x.length / 2)]);
}

function dot(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}

let turnedTo = null; // the position on the slider; null: the token's own

function farthest() {
  return Math.min(XRAY.model.config.context, Math.max(256, XRAY.model.tokens.length)) - 1;
}

function buildRope() {
  fill("rope-slider", slider("Position of the query", { min: 0, max: farthest(), step: 1, value: XRAY.chosen.token },
    (value) => String(value), (value) => {
      turnedTo = value;
      drawRope(XRAY.chosen, XRAY.tokens[XRAY.chosen.token]);
    }));
}

function drawRope({ token: own, head }, data) {
  const { config, frequencies, first_keys } = XRAY.model;
  const layer = XRAY.layer();
  const d = config.head_dim;
  const q = unpack(data.before_rope[layer]).slice(head * d, (head + 1) * d);
  const group = Math.floor((head * config.kv_heads) / config.heads);
  const key = unpack(first_keys[layer]).slice(group * d, (group + 1) * d);
  const position = turnedTo ?? own;
  const input = document.querySelector("#rope-slider input");
  if (turnedTo === null) {
    input.value = own;
    document.querySelector("#rope-slider output").textContent = String(own);
  }
  const after = turned(q, position, frequencies, PAIRINGS.halves);
  const dials = fill("dials", ...frequencies.map((f, i) => dial(q, after, PAIRINGS.halves(i, d), position * f, i)));
  dials.setAttribute("aria-label", `The ${d / 2} pairs of head ${head}'s query, turned to position ${position}.`);
  fill("pairings",
    pairing("halves", "Halves (Hugging Face)", after, PAIRINGS.halves),
    pairing("interleaved", "Interleaved (Meta, llama2.c, GGUF)", turned(interleave(q), position, frequencies, PAIRINGS.interleaved), PAIRINGS.interleaved));
  fill("scores", scores(q, key, position, frequencies));
}

function dial(before, after, [a, b], angle, i) {
  const length = Math.hypot(before[a], before[b]) || 1;
  const arrow = (x, name) => {
    const [right, down] = [(x[a] / length) * 18, (-x[b] / length) * 18];
    return svg("g", { class: name }, svg("line", { x1: 0, y1: 0, x2: right, y2: down }), svg("circle", { cx: right, cy: down, r: 3 }));
  };
  const turns = angle / (2 * Math.PI);
  return el("div", { class: "dial" },
    svg("svg", { viewBox: "-24 -24 48 48", "aria-hidden": "true" },
      svg("circle", { class: "rim", r: 22 }), arrow(before, "before"), arrow(after, "after")),
    el("span", {}, `pair ${i}`), el("small", {}, turns < 1 ? `${number(turns * 360, 2)}°` : `${number(turns, 3)} turns`));
}

// The vector as a row of cells, and an arc between the two features of each pair.
function pairing(name, title, x, pair) {
  const d = x.length;
  const base = 1.6 * d; // of the arcs
  const largest = x.reduce((top, value) => Math.max(top, Math.abs(value)), 0) || 1;
  const cells = Array.from(x, (value, i) => svg("rect", {
    x: i * 10, y: base + 2, width: 9, height: 14, class: value < 0 ? "minus" : "plus", "fill-opacity": Math.sqrt(Math.abs(value) / largest),
  }));
  const arcs = Array.from({ length: d / 2 }, (_, i) => {
    const [from, to] = pair(i, d).map((feature) => feature * 10 + 4.5);
    const radius = (to - from) / 2;
    return svg("path", { d: `M ${from} ${base} A ${radius} ${Math.min(radius, base - 2)} 0 0 1 ${to} ${base}` });
  });
  const [first, second] = pair(0, d);
  return el("figure", { class: "pairing" }, el("figcaption", {}, el("b", {}, title), ` pair 0 is features ${first} and ${second}`),
    svg("svg", { viewBox: `0 0 ${d * 10} ${base + 18}`, role: "img", "aria-label": `${title}: pair i is ${name === "halves" ? "i and i + head_dim / 2" : "2 i and 2 i + 1"}` },
      ...arcs, ...cells));
}

// Scores of a query at each distance from a key at position 0: paired rightly in either layout, and wrongly.
function scoresAt(q, key, position, frequencies) {
  const root = Math.sqrt(q.length);
  const score = (x, k, pair) => dot(turned(x, position, frequencies, pair), k) / root;
  return {
    halves: score(q, key, PAIRINGS.halves),
    interleaved: score(interleave(q), interleave(key), PAIRINGS.interleaved),
    wrong: score(q, key, PAIRINGS.interleaved),
  };
}

function scores(q, key, position, frequencies) {
  const count = farthest() + 1;
  const all = Array.from({ length: count }, (_, m) => scoresAt(q, key, m, frequencies));
  const [low, high] = all.flatMap(({ halves, wrong }) => [halves, wrong]).reduce(([l, h], s) => [Math.min(l, s), Math.max(h, s)], [0, 0]);
  const tell = (m) => `distance ${m}: ${number(all[m].halves)} in halves, ${number(all[m].interleaved)} interleaved; ${number(all[m].wrong)} if halves are taken for interleaved`;
  const drawn = chart({
    label: "Score of the query with the first token's key, by distance",
    height: 180, count, tell,
    at: (x, y, width) => Math.max(0, Math.min(count - 1, Math.round((x / width) * (count - 1)))),
    draw(context, width, height, marked, color) {
      const place = (m, score) => [(m / (count - 1)) * width, 8 + ((high - score) / (high - low || 1)) * (height - 16)];
      const line = (name, stroke, dash) => {
        context.beginPath();
        context.setLineDash(dash);
        all.forEach((each, m) => context.lineTo(...place(m, each[name])));
        context.strokeStyle = stroke;
        context.lineWidth = 1.8;
        context.stroke();
        context.setLineDash([]);
      };
      context.fillStyle = color.line;
      context.fillRect(0, place(0, 0)[1], width, 1);
      line("wrong", color.warm, [5, 4]);
      line("halves", color.accent, []);
      for (const m of [position, marked]) {
        if (m < 0) continue;
        context.beginPath();
        context.arc(...place(m, all[m].halves), 4.5, 0, 7);
        context.fillStyle = m === position ? color.accent : color.ink;
        context.fill();
      }
    },
  });
  const now = all[position];
  return el("figure", {}, drawn, el("figcaption", { class: "key" },
    el("span", { class: "right" }, `right pairing, either layout: ${number(now.halves)}`),
    el("span", { class: "wrong" }, `halves taken for interleaved: ${number(now.wrong)}`)));
}
