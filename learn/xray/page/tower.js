// The tower of blocks, and the ops of the chosen one.
"use strict";

const ABOUT = {
  norm_qkv: ["Normalize, project, turn", "The vector is normalized and multiplied by three matrices: a query, a key and a value for each head. Query and key are turned to their position."],
  attend: ["Look back", "Each head compares its query with the key of every token so far, and takes the mean of their values, weighted by likeness."],
  project_add: ["Write what was found", "The heads' outputs are mixed by one matrix and added to the vector."],
  norm_gate_up: ["Ask and gate", "The vector is normalized and multiplied by two matrices. One half decides how much of the other passes."],
  down_add: ["Write the answer", "What passed goes through one matrix and is added to the vector."],
  moe_add: ["Ask a few experts", "A router chooses experts, feed-forward layers of their own; their answers are weighed and added to the vector."],
  norm_logits: ["Score the vocabulary", "The vector is normalized and multiplied by one row for each token that could come next."],
};

function buildTower() {
  const { model, chosen } = XRAY;
  const floors = [["out", "logits"]];
  for (let i = model.config.layers - 1; i >= 0; i--) floors.push([i, `block ${i}`]);
  const known = (floor) => floor === "out" || model.layers.includes(floor);
  const choose = (value) => {
    const floor = value === "out" ? value : Number(value);
    const ops = opsOf(floor);
    XRAY.choose({ floor, op: ops.includes(chosen.op) ? chosen.op : ops[0] });
  };
  const buttons = floors.map(([floor, name]) =>
    radio("floor", floor, floor === chosen.floor, [el("b", {}, name), el("span", { class: "guess", "data-floor": floor })],
      choose, { disabled: !known(floor) }));
  radios("floors", [...buttons, el("p", { class: "ground" }, "embedding of the token")]);
}

function opsOf(floor) {
  const ops = XRAY.model.ops.map((each) => each.op);
  return floor === "out" ? ["norm_logits"] : ops.filter((op) => op !== "norm_logits");
}

function drawTower({ floor, op }, data) {
  for (const place of document.querySelectorAll(".guess")) {
    const at = place.dataset.floor;
    const [guess] = (at === "out" ? data.next : data.guesses[at]) ?? [];
    place.replaceChildren(...(guess ? [el("q", {}, token(guess.text)), ` ${percent(guess.probability)}`] : ["not looked into"]));
  }
  if (drawTower.drawn !== `${floor}`) drawBlock(floor, op);
  drawTower.drawn = `${floor}`;
}

// A half of a block leaves the stream of vectors, and comes back to it with a sum.
function drawBlock(floor, chosen) {
  const ops = opsOf(floor);
  const button = (op) =>
    radio("op", op, op === chosen, [el("b", {}, op), el("small", {}, ABOUT[op][0])], (value) => XRAY.choose({ op: value }));
  const half = (name, part) =>
    el("div", { class: "half" }, el("span", { class: "half-name" }, name), ...part.map(button));
  const halves = floor === "out" ? [half("after the last block", ops)]
    : [half("attention", ops.slice(0, 3)), half("feed-forward", ops.slice(3))];
  radios("block", [el("div", { class: "halves" }, ...halves)]);
}
