// The KV cache: what is kept, and how many bytes that takes.
"use strict";

function drawKept({ token: position }) {
  const { model } = XRAY;
  const { config, cache, tokens } = model;
  const keys = tokens.length;
  const seen = (layer, at) => at <= position && (!cache.windows[layer] || at > position - cache.windows[layer]);
  const values = model.layers.flatMap((layer) => cache.norms[layer].map((norm, at) => (seen(layer, at) ? norm : 0)));
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  const map = {
    name: "‖k, v‖", axes: ["layers", "tokens"], shape: [model.layers.length, keys], columns: keys,
    values: btoa(String.fromCharCode(...bytes)),
  };
  const each = 2 * config.kv_heads * config.head_dim;
  fill("kept",
    el("p", {}, `Each cell stands for ${each} numbers: a key and a value of ${config.head_dim} for each of ${config.kv_heads} heads. `,
      config.heads > config.kv_heads ? `${config.heads} query heads share them; with a key and a value for each of those it would be ${config.heads / config.kv_heads} times as much.` : ""),
    heatMap(map, "values", (i) => `: ${token(tokens[i % keys].text)} in block ${model.layers[Math.floor(i / keys)]}`));
}

function buildCache() {
  const { config, tokens } = XRAY.model;
  fill("cache-slider", slider("Tokens kept", { min: 1, max: config.context, step: 1, value: tokens.length },
    (value) => value.toLocaleString("en"), drawCost));
  drawCost(tokens.length);
}

function drawCost(tokens) {
  const { cache, weights } = XRAY.model;
  const costs = Object.entries(cache.bytes).map(([dtype, each]) => [`cache in ${dtype}`, each * tokens, `${amount(each, "B")} a token`]);
  const rows = [...costs, ["weights in bfloat16", 2 * weights, "read for each token"]];
  const most = Math.max(...rows.map(([, bytes]) => bytes));
  fill("cache-cost", el("div", { class: "bars" }, ...rows.map(([name, bytes, note]) =>
    el("div", { class: "bar" }, el("span", { class: "bar-name" }, name),
      el("div", { class: "parts", "aria-hidden": "true" }, el("span", { class: name.startsWith("cache") ? "this" : "", style: `flex: none; width: ${(100 * bytes) / most}%` })),
      el("span", { "data-bytes": bytes }, `${amount(bytes, "B")}, ${note}`)))));
}
