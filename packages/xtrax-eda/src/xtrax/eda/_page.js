"use strict";
// The page reads without this script; it adds the step-through, the sliders and the trial of other boundaries.
const plan = JSON.parse(document.getElementById("plan").textContent);
const $ = (selector, root = document) => root.querySelector(selector);
const count = (n) => (n < 1e15 ? n.toLocaleString("en-US") : n.toExponential(2));
const percent = (f) => (f > 0 && f < 0.001 ? "<0.1 %" : `${+(100 * f).toFixed(1)} %`);
const ceilDiv = (a, b) => Math.ceil(a / b);

function bytes(size) {
  const sign = size < 0 ? "-" : "";
  const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
  let value = Math.abs(size), unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  const digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${sign}${+value.toFixed(digits)} ${units[unit]}`;
}

function bind(range, number, set) {
  const clamp = (value) => Math.min(Math.max(Math.round(value), +range.min), +range.max);
  range.addEventListener("input", () => { number.value = range.value; set(+range.value); });
  number.addEventListener("input", () => {
    if (number.validity.valid && number.value !== "") { range.value = number.value; set(+number.value); }
  });
  number.addEventListener("change", () => {
    const value = number.value === "" ? +range.value : clamp(+number.value);
    number.value = range.value = value;
    set(value);
  });
  return (value) => { number.value = range.value = clamp(value); set(clamp(value)); };
}

// Step through the run: the innermost axis turns fastest.
function stepThrough() {
  const box = $("#stepper");
  if (!box) return;
  const axes = plan.axes.map((axis, i) => ({ ...axis, node: $(`#axis-${i}`), turns: axis.steps ?? 1 }));
  const total = axes.reduce((product, axis) => product * axis.turns, 1);
  if (total < 2 || total > Number.MAX_SAFE_INTEGER) return;
  box.hidden = false;
  const range = $("input[type=range]", box), number = $("input[type=number]", box), out = $("output", box);
  const play = $(".play", box);
  range.max = number.max = total;
  let timer = null;

  // The place of a turn in the strip, from and to in fractions of it.
  function place(axis, turn) {
    if (axis.kind === "deduplicated") return [0, 1]; // its strip shows shares, not where elements are
    if (!axis.batches) {
      const gap = axis.turns > 1 && axis.turns <= 48 ? 0.2 : 0; // as the strip is drawn
      return [turn / axis.turns, (turn + 1 - gap) / axis.turns];
    }
    let left = turn, before = 0;
    for (const [, batches, elements] of axis.batches) {
      if (left < batches) {
        const start = before + left * axis.batch_size;
        return [start / axis.cardinality, Math.min(start + axis.batch_size, before + elements) / axis.cardinality];
      }
      left -= batches;
      before += elements;
    }
    return [0, 1];
  }

  function where(axis, turn) {
    if (axis.cardinality === 0) return "no elements";
    if (axis.batches) {
      let left = turn;
      const bucket = axis.batches.find(([, batches]) => (left < batches ? true : ((left -= batches), false)));
      return bucket ? `batch ${count(left + 1)} of ${count(bucket[1])}, padded to length ${count(bucket[0])}` : "";
    }
    if (axis.kind === "chunked") {
      const size = ceilDiv(axis.cardinality, axis.turns);
      const start = Math.max(turn * size - (axis.turns * size - axis.cardinality), 0);
      return `elements ${count(start)} to ${count(start + size - 1)}`;
    }
    if (axis.kind === "vectorized") return axis.cardinality === 1 ? "element 0" : `elements 0 to ${count(axis.cardinality - 1)}`;
    if (axis.kind === "deduplicated") {
      return axis.turns === 1 ? "every distinct element" : `chunk ${count(turn + 1)} of ${count(axis.turns)} of the distinct elements`;
    }
    if (axis.steps === null) return axis.strategy === "WhileCarry" ? "as often as its condition holds" : "one turn of an unknown number";
    return `element ${count(turn)}`;
  }

  const set = bind(range, number, (step) => {
    let rest = step - 1;
    for (const axis of [...axes].reverse()) {
      const turn = rest % axis.turns;
      rest = Math.floor(rest / axis.turns);
      const at = $(":scope > .strip .at", axis.node);
      const [from, to] = place(axis, turn);
      at.style.left = `${100 * from}%`;
      at.style.width = `${100 * (to - from)}%`;
      $(":scope > .now", axis.node).textContent = `now: ${where(axis, turn)}`;
    }
    $("#nest").classList.add("running");
    const text = `Step ${count(step)} of ${count(total)}`;
    out.textContent = timer ? text : `${text}: ${axes.map((axis) => `${axis.name}, ${$(":scope > .now", axis.node).textContent.slice(5)}`).join("; ")}.`;
    range.setAttribute("aria-valuetext", text);
    $(".back", box).disabled = step <= 1;
    $(".next", box).disabled = step >= total;
  });
  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    out.setAttribute("aria-live", "polite");
  }
  $(".back", box).addEventListener("click", () => { stop(); set(+range.value - 1); });
  $(".next", box).addEventListener("click", () => { stop(); set(+range.value + 1); });
  play.addEventListener("click", () => {
    if (timer) { stop(); set(+range.value); return; }
    if (+range.value >= total) set(1);
    out.setAttribute("aria-live", "off"); // a screen reader should not read out every frame
    play.textContent = "Pause";
    timer = setInterval(() => {
      const next = Math.min(+range.value + Math.max(1, Math.round(total / 300)), total);
      if (next >= total) stop();
      set(next);
    }, Math.min(Math.max(12000 / total, 60), 700));
  });
  const unknown = axes.filter((axis) => axis.steps === null).map((axis) => axis.name);
  const within = unknown.length ? ` in one turn of ${unknown.join(" and ")}` : ", one after another";
  out.textContent = `${count(total)} steps${within}. Move the slider to see which elements each one computes.`;
  $(".back", box).disabled = true;
}

// Memory for other batch sizes: the estimate moves along the slope of each axis.
function whatIf() {
  const memory = plan.memory, box = $("#what-if");
  if (!memory || !box) return;
  const axes = plan.axes
    .map((axis, i) => ({ ...axis, slope: memory.slope_by_axis[axis.name], row: $(`#memory-${i}`) }))
    .filter((axis) => axis.slope !== undefined && axis.row);
  const movable = axes.filter((axis) => $(".control", axis.row));
  if (!movable.length) return;
  box.hidden = false;
  const size = Object.fromEntries(axes.map((axis) => [axis.name, axis.batch_size]));
  // Where the sizes of nested axes multiply, their shares sum to more than there is.
  const overlapping = axes.reduce((sum, axis) => sum + axis.slope * axis.batch_size, 0) > memory.estimate;
  const total = () => axes.reduce((sum, axis) => sum + axis.slope * (size[axis.name] - axis.batch_size), memory.estimate);
  const steps = (axis) => (axis.cardinality === 0 ? 0 : ceilDiv(axis.cardinality, Math.max(size[axis.name], 1)));

  function fitting(axis) {
    const room = memory.budget - (total() - axis.slope * size[axis.name]);
    if (room < 0) return null;
    const most = axis.slope > 0 ? Math.floor(room / axis.slope) : axis.cardinality;
    if (most >= axis.cardinality) return axis.cardinality;
    const chunk = most - (most % axis.tile_granularity);
    return chunk >= 1 ? chunk : null;
  }

  function show() {
    const now = total(), over = memory.budget !== null && now > memory.budget;
    const scale = Math.max(now, memory.budget ?? 0, memory.estimate) || 1;
    const bar = $("#memory-total");
    let x = 0;
    const place = (mark, amount) => {
      mark.style.left = `${(100 * x) / scale}%`;
      mark.style.width = `${(100 * Math.max(amount, 0)) / scale}%`;
      x += Math.max(amount, 0);
    };
    const parts = axes.reduce((sum, axis) => sum + axis.slope * size[axis.name], 0);
    place($(".rest", bar), overlapping ? now : now - parts);
    for (const axis of axes) {
      const part = axis.slope * size[axis.name];
      place($(`[data-axis="${axis.index}"]`, bar), overlapping ? 0 : part);
      const own = $(".bar i", axis.row);
      own.style.width = `${Math.min((100 * part) / scale, 100)}%`;
      $(".bytes", axis.row).textContent = bytes(part);
      const control = $(".control", axis.row);
      if (!control) continue;
      const turns = steps(axis);
      $(".turns", axis.row).textContent = `${count(size[axis.name])} at once, ${count(turns)} ${turns === 1 ? "step" : "steps"}`;
      const most = memory.budget === null ? null : fitting(axis);
      const button = $("button", control);
      button.hidden = memory.budget === null;
      button.disabled = most === null || most === size[axis.name];
      button.textContent = most === null ? "None fits" : `Largest that fits: ${count(most)}`;
    }
    const limit = $(".limit", bar);
    if (limit) limit.style.left = `${(100 * memory.budget) / scale}%`;
    const excess = $(".toomuch", bar);
    excess.hidden = !over;
    if (over) {
      excess.style.left = `${(100 * memory.budget) / scale}%`;
      excess.style.width = `${(100 * (now - memory.budget)) / scale}%`;
    }
    const verdict = $("#memory-verdict");
    verdict.className = `total ${memory.budget === null ? "" : over ? "over" : "fits"}`;
    verdict.textContent = memory.budget === null ? `${bytes(now)}` : over
      ? `${bytes(now)}: ${bytes(now - memory.budget)} over the budget of ${bytes(memory.budget)}`
      : `${bytes(now)} of ${bytes(memory.budget)}: fits`;
    const changed = movable.filter((axis) => size[axis.name] !== axis.batch_size);
    $(".reset", box).disabled = changed.length === 0;
    const code = $("pre", box);
    code.hidden = changed.length === 0;
    code.textContent = changed
      .map((axis) => `AxisSpec(${JSON.stringify(axis.name)}, cardinality=${axis.cardinality}, default_batch_size=${size[axis.name]})`)
      .join("\n");
    const small = changed.some((axis) => size[axis.name] < 16 && size[axis.name] < axis.cardinality);
    $(".small-sizes", box).hidden = !small;
  }

  const setters = movable.map((axis) => {
    const control = $(".control", axis.row);
    control.hidden = false;
    const set = bind($("input[type=range]", control), $("input[type=number]", control), (value) => {
      size[axis.name] = value;
      show();
    });
    $("button", control).addEventListener("click", () => { const most = fitting(axis); if (most !== null) set(most); });
    return () => set(axis.batch_size);
  });
  $(".reset", box).addEventListener("click", () => setters.forEach((reset) => reset()));
  show();
}

// Other boundaries for the same lengths.
function tryBoundaries() {
  for (const box of document.querySelectorAll(".try-boundaries")) {
    const lengths = plan.buckets[box.dataset.axis].lengths;
    const input = $("input", box), out = $("output", box);
    box.hidden = false;
    input.addEventListener("input", () => {
      const sizes = input.value.split(/[\s,;]+/).filter(Boolean).map(Number);
      const longest = lengths.length ? lengths[lengths.length - 1][0] : 0;
      let fault = "";
      if (!sizes.length || sizes.some((n) => !Number.isInteger(n) || n < 1)) fault = "Write whole numbers of at least 1, such as 16, 32, 64.";
      else if (sizes.some((n, i) => i && n <= sizes[i - 1])) fault = "Each boundary must be larger than the one before.";
      else if (longest > sizes[sizes.length - 1]) fault = `The longest element has length ${count(longest)}: add a boundary of at least that.`;
      input.setCustomValidity(fault);
      if (fault) { out.textContent = fault; return; }
      let data = 0, padded = 0;
      const used = new Set();
      for (const [length, number] of lengths) {
        const size = sizes.find((n) => length <= n);
        used.add(size);
        data += length * number;
        padded += size * number;
      }
      out.textContent = `${percent(padded ? (padded - data) / padded : 0)} padding, ${count(used.size)} ${used.size === 1 ? "program" : "programs"} to compile.`;
    });
    input.dispatchEvent(new Event("input"));
  }
}

stepThrough();
whatIf();
tryBoundaries();
