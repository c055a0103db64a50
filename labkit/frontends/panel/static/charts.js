// The live charts: plotly draws each chart once, then only new points arrive. The kernel owns the state: a new page
// sends "ready" and receives every chart whole, so that a reload, a second view and a late view all show the same.

const PATIENCE = 60_000; // ms to wait for plotly.js before the kernel sends plain SVG
const AGAIN = 500; // ms after which a chart that could not be drawn is drawn again
const ACTS = ["pointerdown", "click", "input", "keydown"];
const ANSWERED = 300; // ms after an act in which its answer comes before new points of charts
const REST = 5; // times as long as a chart took to draw, no chart is drawn
const NEXT = 10_000; // ms after which another widget asks for plotly.js, too: the kernel of the first may be gone

// plotly.js comes from the kernel, once per page, and never from an external host.
function plotly(model) {
  const home = `__labkit_plotly_${model.get("plotly_version")}`;
  const first = !window[home];
  if (first) {
    let arrived;
    const module = new Promise((resolve) => (arrived = resolve));
    window[home] = { module, arrived };
  }
  const { module, arrived } = window[home];
  const heard = (message, buffers) => {
    if (message.kind === "plotly") arrived(unpacked(buffers[0]));
  };
  model.on("msg:custom", heard);
  const asking = setTimeout(() => model.send({ kind: "plotly" }), first ? 0 : NEXT);
  const done = () => {
    clearTimeout(asking);
    model.off("msg:custom", heard);
  };
  module.then(done, done);
  return module;
}

async function unpacked(buffer) {
  const stream = new Blob([buffer]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(stream).text();
  const module = { exports: {} };
  new Function("module", "exports", "define", source)(module, module.exports, undefined);
  return module.exports;
}

// The colours of the page's theme, read at every redraw because the user may change the theme.
function theme(element) {
  const style = getComputedStyle(element);
  const of = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  const scale = Number(of("--labkit-scale", "1")); // of letters and lines: larger in presentation mode
  return { ink: of("--labkit-ink", style.color), grid: of("--labkit-grid", "rgba(128,128,128,0.3)"), scale };
}

const ENTRY = 20; // px of height of one entry of a legend
const NARROW = 330; // px of width below which a chart with letters of normal size has no legend
const BASE_HEIGHT = 140; // px of height that a chart needs for letters of normal size
const BOLD = 0.64; // width of a letter of a heading, relative to its size
const LETTER = 0.6; // width of a letter of an axis title, relative to its size
const SMALLEST = 7; // px of an axis title
const FEW = 4; // numbers below a narrow chart
const NOTE = /<span.*<\/span>/; // of a heading
const NOTE_SIZE = 10; // px of its letters
const BELOW_HEADING = 0.25; // of the top margin

function themed(chart, { ink, grid, scale }, charts) {
  const shown = [...charts].filter(({ box }) => box.clientHeight);
  for (const one of shown) shape(one, scale, shown); // the size of its letters depends on all of them
  const { layout, data } = chart;
  layout.font.color = ink;
  for (const axis of [layout.xaxis, layout.yaxis]) axis.gridcolor = grid;
  for (const trace of data) if (trace.meta?.ink) trace.line.color = ink;
  layout.xaxis.title.font = layout.yaxis.title.font = { size: Math.min(...shown.map(titleSize)) }; // one size in all charts
  fitNote(chart);
  fitLegend(chart);
}

function shape(chart, wanted, shown) {
  const scale = Math.min(wanted, Math.max(1, chart.box.clientHeight / BASE_HEIGHT));
  const { data } = chart;
  widen(chart);
  resize(chart, scale / (chart.scale ?? 1));
  chart.scale = scale;
  if (chart.box.clientWidth < NARROW * scale) narrow(chart, shown);
  else if (data.every((trace) => trace.type === "scatter") && ENTRY * scale * data.filter(({ showlegend }) => showlegend).length > legendRoom(chart)) unlisted(chart);
}

// The note beside a heading ends where the chart ends.
function fitNote({ box, scale, layout: { title } }) {
  const [heading, note] = [title.text.replace(NOTE, ""), title.text.match(NOTE)?.[0] ?? ""].map(letters);
  const room = box.clientWidth - 2 * title.pad.l - BOLD * title.font.size * heading;
  const size = Math.max(SMALLEST, Math.min(NOTE_SIZE * scale, room / (LETTER * note)));
  title.text = title.text.replace(/font-size:[\d.]+px/, `font-size:${size}px`);
}

// How many letters a text has without its markup.
function letters(text) {
  return text.replace(/<[^>]*>/g, "").length;
}

// A narrow chart, one of four in a row, has the room for its plot: no legend and no note, whose colours and words the
// picture of the machine and the hover text have.
function narrow(chart, shown) {
  unlisted(chart);
  const { title } = chart.layout;
  title.text = title.text.replace(NOTE, "");
  chart.layout.xaxis.nticks = FEW;
  title.font.size = Math.min(title.font.size, ...shown.map(headingSize)); // one size in all charts
}

// The heading of a narrow chart is no longer than the chart.
function headingSize({ box, layout: { title } }) {
  return (box.clientWidth - 2 * title.pad.l) / (BOLD * letters(title.text.replace(NOTE, "")));
}

// No legend of ranks that would end before the last rank.
function unlisted(chart) {
  const { layout } = chart;
  chart.wide = { right: layout.margin.r, title: layout.title.text, size: layout.title.font.size, nticks: layout.xaxis.nticks };
  layout.showlegend = false;
  layout.margin.r = layout.margin.t / 2;
}

function widen(chart) {
  if (!chart.wide) return;
  const { layout, wide } = chart;
  delete layout.showlegend;
  layout.margin.r = wide.right;
  layout.title.text = wide.title;
  layout.title.font.size = wide.size;
  layout.xaxis.nticks = wide.nticks;
  chart.wide = null;
}

// The rotated title of the y axis is no longer than the axis: in a low chart it would reach the heading. That of the x axis
// stands in the middle of it, and ends where the chart ends.
function titleSize({ box, layout: { xaxis, yaxis, font, margin } }) {
  const high = (box.clientHeight - margin.t - margin.b) / yaxis.title.text.length;
  const wide = (box.clientWidth - Math.abs(margin.l - margin.r)) / xaxis.title.text.length;
  return Math.max(SMALLEST, Math.min(1.2 * font.size, Math.min(high, wide) / LETTER));
}

// The legend begins below the heading, and scrolls if it is longer than the chart.
function legendRoom({ box, layout: { margin } }) {
  return box.clientHeight - margin.t;
}

function fitLegend(chart) {
  const { legend, margin } = chart.layout;
  const room = legendRoom(chart);
  const above = legend.y > 1 ? BELOW_HEADING * margin.t : 0; // the plot
  legend.y = 1 + above / (room - margin.b);
  legend.maxheight = room + above;
}

function resize({ layout, data }, by) {
  if (by === 1) return;
  for (const font of [layout.font, layout.title.font, layout.legend.font]) font.size *= by;
  for (const side of ["l", "r", "t", "b"]) layout.margin[side] *= by;
  for (const trace of data) if (trace.type === "scatter") trace.line.width *= by;
}

// A text description of the chart: the newest value of each line, the height of each bar, or the total duration of each
// kind of span.
function describe({ label, data, layout }) {
  const told = data.some((trace) => trace.showlegend) ? data.filter((trace) => trace.showlegend !== false) : data;
  const parts = told.map((trace) => {
    if (trace.orientation === "h") return `${trace.name} ${short(trace.x.reduce((sum, each) => sum + each, 0))} in ${trace.x.length} spans`;
    if (trace.type === "bar") return `${trace.name} ${trace.x.map((category, index) => `${category} ${value(trace, index)}`).join(", ")}`;
    const last = trace.y.findLastIndex((value) => value !== null);
    return last < 0 ? "" : `${trace.name} ${value(trace, last)} at ${short(trace.x[last])}`;
  });
  const unit = data[0]?.orientation === "h" ? layout.xaxis.title.text : layout.yaxis.title.text;
  return `${label}, ${unit}: ${parts.filter(Boolean).join("; ") || "no data yet"}`;
}

// Bytes arrive as text with a unit.
function value(trace, index) {
  return trace.text?.[index] ?? short(trace.y[index]);
}

function short(value) {
  return value === null || value === undefined ? "unknown" : Number(value.toPrecision(4)).toLocaleString("en");
}

function takeMore(chart, more) {
  for (const [index, xs, ys, words] of more.points) {
    const trace = chart.data[index];
    // the placeholder of an empty line
    if (trace.x.length === 1 && trace.x[0] === null) trace.x.length = trace.y.length = 0;
    trace.x.push(...xs);
    trace.y.push(...ys);
    trace.text?.push(...words);
    if (trace.x.length > 1) trace.mode = "lines";
  }
  more.bars.forEach(([values, words], index) => Object.assign(chart.data[index], { y: values }, words.length ? { text: words } : {}));
  if (more.x) chart.layout.xaxis.range = more.x;
  if (more.y) chart.layout.yaxis.range = more.y;
  chart.layout.datarevision = (chart.layout.datarevision ?? 0) + 1;
}

class Board {
  constructor(element, Plotly, config) {
    this.element = element;
    this.Plotly = Plotly;
    this.config = config;
    this.charts = new Map();
    this.frame = 0;
    this.rests = 0; // the timer of a pause
    this.resizing = new ResizeObserver(() => this.changed()); // of the boxes: one more chart makes the others narrower
    this.theming = new MutationObserver(() => this.changed());
    this.theming.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light"] });
    const panel = element.closest(".labkit");
    this.closing = new AbortController();
    this.actedAt = -ANSWERED;
    if (!panel) return;
    this.theming.observe(panel, { attributes: true, attributeFilter: ["class"] }); // presentation mode
    const listening = { capture: true, passive: true, signal: this.closing.signal };
    for (const act of ACTS) panel.addEventListener(act, () => (this.actedAt = performance.now()), listening);
  }

  take(names, updates) {
    for (const name of [...this.charts.keys()]) if (!names.includes(name)) this.remove(name);
    for (const update of updates) {
      if (update.whole) Object.assign(this.chart(update.name), update.whole, { dirty: true, scale: 1, wide: null });
      else {
        const chart = this.chart(update.name);
        takeMore(chart, update.more);
        chart.dirty = true;
      }
    }
    const boxes = names.map((name) => this.charts.get(name)?.box).filter(Boolean); // a chart comes with its first data
    if (boxes.some((box, place) => this.element.children[place] !== box)) this.element.append(...boxes);
    this.schedule();
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const box = document.createElement("div");
      box.className = "labkit-chart";
      box.dataset.chart = name;
      this.element.append(box);
      this.charts.set(name, { box, data: [], layout: {} });
      this.resizing.observe(box);
    }
    return this.charts.get(name);
  }

  remove(name) {
    const { box } = this.charts.get(name);
    this.resizing.unobserve(box);
    this.Plotly.purge(box);
    box.remove();
    this.charts.delete(name);
  }

  changed() {
    for (const chart of this.charts.values()) chart.dirty = chart.urgent = true;
    clearTimeout(this.rests);
    this.rests = 0;
    this.schedule();
  }

  // New points are stored immediately and drawn later, one chart in a frame, the one that has waited longest. After each
  // the page rests, so that it answers while many ranks train, and after an act of the user it waits for the answer. A
  // chart that is new, or has another size or theme, does not wait.
  schedule() {
    if (this.frame || this.rests) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const visible = [];
      for (const chart of this.charts.values()) {
        const { box, dirty } = chart;
        if (!dirty) continue;
        const wasHidden = chart.hidden;
        chart.hidden = !box.clientWidth && !box.clientHeight;
        if (box.clientWidth && box.clientHeight) visible.push(chart);
        else if (chart.hidden && !wasHidden) {
          // it is drawn when it becomes visible: it is observed anew, as the observer tells nothing of a box that is
          // hidden and shown within one frame; only once, because the observer answers, and the answer comes here
          this.resizing.unobserve(box);
          this.resizing.observe(box);
        }
      }
      if (visible.length) this.drawFirst(visible);
    });
  }

  drawFirst(charts) {
    const urgent = charts.filter(({ drawn, urgent }) => urgent || !drawn);
    const answering = this.actedAt + ANSWERED - performance.now();
    if (!urgent.length && answering > 0) return this.rest(answering);
    const [chart] = (urgent.length ? urgent : charts).sort((one, other) => (one.drawnAt ?? 0) - (other.drawnAt ?? 0));
    const began = performance.now();
    this.draw(chart);
    chart.urgent = false;
    chart.drawnAt = performance.now();
    if (urgent.length > 1) this.schedule();
    else this.rest(REST * (chart.drawnAt - began));
  }

  rest(milliseconds) {
    this.rests = setTimeout(() => {
      this.rests = 0;
      this.schedule();
    }, milliseconds);
  }

  draw(chart) {
    chart.dirty = false;
    themed(chart, theme(this.element), this.charts.values());
    chart.layout.width = chart.box.clientWidth;
    chart.layout.height = chart.box.clientHeight;
    chart.box.setAttribute("role", "figure");
    chart.box.setAttribute("aria-label", describe(chart));
    try {
      if (chart.drawn) this.Plotly.react(chart.box, chart.data, chart.layout, this.config);
      else this.Plotly.newPlot(chart.box, chart.data, chart.layout, this.config);
      chart.drawn = true;
      accessible(chart.box);
    } catch (error) { // as in a box that is too low for axes while the page is laid out; the other charts go on
      console.warn("labkit: a chart is drawn again", error);
      this.Plotly.purge(chart.box);
      chart.drawn = false;
      chart.dirty = true;
      setTimeout(() => this.schedule(), AGAIN);
    }
  }

  close() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.rests);
    this.closing.abort();
    this.resizing.disconnect();
    this.theming.disconnect();
    for (const chart of this.charts.values()) this.Plotly.purge(chart.box);
  }
}

function render({ model, el }) {
  el.classList.add("labkit-charts");
  let board = null;
  let closed = false;
  const heard = (message) => {
    if (message.kind === "charts") board.take(message.names, message.charts);
  };
  const failed = (why) => model.send({ kind: "failed", why: String(why) });
  const late = setTimeout(() => failed("plotly.js has not arrived"), PATIENCE); // when it does, it replaces the SVG
  plotly(model).then((Plotly) => {
    if (closed) return;
    board = new Board(el, Plotly, model.get("plotly_config"));
    model.on("msg:custom", heard);
    model.send({ kind: "ready" });
  }).catch(failed).finally(() => clearTimeout(late));
  return () => {
    closed = true;
    clearTimeout(late);
    model.off("msg:custom", heard);
    board?.close();
  };
}

export default { render: withHandshake(render) };
