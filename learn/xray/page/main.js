// The page: the model in a line, the tokens, and every view.
"use strict";

function buildTokens() {
  const { tokens, chosen } = XRAY.model;
  radios("text", [el("div", { class: "tokens" }, ...tokens.map(({ text, id }, i) =>
    radio("token", i, i === XRAY.chosen.token, [token(text)], (value) => XRAY.choose({ token: Number(value) }),
      { disabled: !chosen.includes(i), title: `position ${i}, id ${id}` })))]);
}

function describeModel() {
  const { name, dtype, config, weights } = XRAY.model;
  const facts = [
    [name, "model"], [amount(weights, ""), "weights in matrices"], [config.layers, "blocks"], [config.dim, "dim"],
    [`${config.heads} / ${config.kv_heads}`, "heads / kv_heads"], [config.head_dim, "head_dim"], [config.ffn, "ffn"],
    [config.vocab.toLocaleString("en"), "vocab"], [dtype, "dtype that ran"],
  ];
  fill("model", ...facts.map(([value, what]) => el("span", { class: "fact" }, el("b", {}, String(value)), ` ${what}`)));
}

// Scroll lists so far that what is chosen in them is seen, without moving the page.
function reveal() {
  for (const list of document.querySelectorAll(".tokens, #floors")) {
    const [box, chosen] = [list, list.querySelector("input:checked").parentElement].map((each) => each.getBoundingClientRect());
    list.scrollLeft += Math.max(0, chosen.right - box.right + 24) - Math.max(0, box.left - chosen.left);
    list.scrollTop += Math.max(0, chosen.bottom - box.bottom + 24) - Math.max(0, box.top - chosen.top);
  }
}

function start() {
  const { model } = XRAY;
  Object.assign(XRAY.chosen, { token: Math.max(...model.chosen), floor: model.layers[0], op: "norm_qkv", head: 0 });
  describeModel();
  buildTokens();
  buildTower();
  buildHeads();
  buildRope();
  buildCache();
  buildSampling();
  buildQuantize();
  for (const view of [drawTower, drawOp, drawAttention, drawRope, drawKept, drawSampling, reveal]) XRAY.view(view);
  return XRAY.choose({});
}

start().then(() => document.documentElement.setAttribute("data-ready", ""));
