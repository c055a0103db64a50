// The page's script: unpacks plotly after the text is shown, draws figures when they are near the viewport, and all of
// them for print.
(() => {
  "use strict";
  const root = document.documentElement;
  const PAPER = 680; // px: the width between the margins of A4 and Letter
  const HALF = 332; // px: two figures side by side
  const MIN_WIDTH = 640; // px of a figure with many parts
  const INK = "%INK%";
  const GRID = "%GRID%";
  const CLEAR = "rgba(0,0,0,0)"; // the background of a figure without one
  const CONFIG = %CONFIG%;
  const NOTE = "</b><span";
  const EDGES = 20; // px on both sides of a title
  const LETTER = 0.64; // width of a letter of a title, relative to its size

  // ---- light and dark: as the system is set, until the user chooses

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const remember = (theme) => {
    try {
      localStorage.setItem("labkit-theme", theme);
    } catch {
      // no storage for local files: the choice lasts until the page is closed
    }
  };
  const say = () => {
    button.textContent = isDark() ? "☀ Light" : "☾ Dark";
  };
  try {
    const chosen = localStorage.getItem("labkit-theme");
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  } catch {
    // as above
  }
  button.hidden = false;
  say();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    say();
    drawn.forEach((figure) => figure.draw());
  });
  system.addEventListener("change", () => {
    say();
    drawn.forEach((figure) => figure.draw());
  });

  // ---- figures

  async function unpacked(id) {
    const text = document.getElementById(id).textContent;
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // What is scrolled can be scrolled with the keyboard, too.
  function reach(box) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }

  function theme() {
    const style = getComputedStyle(document.body);
    // computed colours, because CSS variables are not resolved
    return { ink: style.color, grid: style.columnRuleColor };
  }

  const drawn = new Set();

  class Figure {
    constructor(place, source) {
      this.place = place;
      this.source = source;
      this.box = document.createElement("div");
      this.box.className = "live";
      this.width = 0;
      place.append(this.box);
    }

    draw(width = this.place.clientWidth, ink = theme()) {
      if (!width) return; // in a closed section
      const text = this.source.replaceAll(JSON.stringify(INK), JSON.stringify(ink.ink)).replaceAll(JSON.stringify(GRID), JSON.stringify(ink.grid));
      const { data, layout = {}, frames } = JSON.parse(text);
      const moves = layout.meta?.controls && frames?.length;
      if (moves) withoutControls(layout);
      const plain = layout.template?.layout?.paper_bgcolor ? {} : { paper_bgcolor: CLEAR, plot_bgcolor: CLEAR, font: { color: ink.ink } };
      const shown = this.place.closest(".charts") ? width : Math.max(width, minWidth(layout));
      const fitted = { ...plain, ...layout, font: { ...plain.font, ...layout.font }, width: shown, height: layout.height || 450, autosize: false };
      if (shown < 520) narrow(fitted, data);
      for (const trace of data) if (trace.meta?.ink && trace.line) trace.line.color = ink.ink;
      const first = !this.width;
      this.width = width;
      window.Plotly.react(this.box, data, fitted, CONFIG);
      accessible(this.box);
      reach(this.place);
      if (first && frames?.length) window.Plotly.addFrames(this.box, frames);
      if (first && moves) this.controls = new Controls(this.place, this.box, frames, layout.meta.plays);
      this.controls?.whole();
      this.place.classList.add("drawn");
      drawn.add(this);
    }
  }

  // A figure that moves is whole until it is played, and on paper. Its slider and button are those of the page, because
  // no key reaches plotly's.
  function withoutControls(layout) {
    delete layout.sliders;
    delete layout.updatemenus;
    layout.height -= layout.meta.controls;
    layout.margin.b -= layout.meta.controls;
  }

  class Controls {
    constructor(place, box, frames, plays) {
      this.box = box;
      this.moments = frames.map((frame) => frame.name);
      this.slider = Object.assign(document.createElement("input"), { type: "range", max: frames.length - 1 });
      this.slider.setAttribute("aria-label", "moment");
      this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
      this.name = document.createElement("span");
      const play = Object.assign(document.createElement("button"), { type: "button", textContent: "▶ Play" });
      play.addEventListener("click", () => this.play(plays / frames.length));
      const row = Object.assign(document.createElement("div"), { className: "moments screen" });
      row.append(play, this.slider, this.name);
      place.append(row);
    }

    show(moment) {
      this.slider.value = moment;
      this.slider.setAttribute("aria-valuetext", this.moments[moment]);
      this.name.textContent = this.moments[moment];
    }

    draw(moment) {
      this.show(moment);
      const options = { mode: "immediate", frame: { duration: 0, redraw: true }, transition: { duration: 0 } };
      window.Plotly.animate(this.box, [this.moments[moment]], options);
    }

    go(moment) {
      clearInterval(this.timer);
      this.draw(moment);
    }

    play(each) {
      this.go(0);
      let moment = 0;
      this.timer = setInterval(() => {
        moment += 1;
        this.draw(moment);
        if (moment === this.moments.length - 1) clearInterval(this.timer);
      }, each);
    }

    // after each drawing: it shows the last moment
    whole() {
      clearInterval(this.timer);
      this.show(this.moments.length - 1);
    }
  }

  // On a phone, figures with several subplots or many marks are scrolled instead of squeezed.
  function minWidth(layout) {
    const marks = (layout.shapes?.length ?? 0) + (layout.annotations?.length ?? 0);
    return layout.xaxis2 || marks > 8 ? MIN_WIDTH : 0;
  }

  // On a phone the legend is below the figure instead of next to it, and the note is below the title.
  function narrow(layout, data) {
    const several = Object.keys(layout).filter((name) => /^legend\d+$/.test(name)).length > 0;
    if (!several && layout.showlegend !== false && data.some((trace) => trace.showlegend !== false)) {
      layout.legend = { ...layout.legend, orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom" };
      layout.margin = { ...layout.margin, r: 12, b: (layout.margin?.b ?? 60) + 56 };
      layout.height += 56;
    }
    fitTitle(layout);
    if (!layout.title?.text?.includes(NOTE)) return;
    layout.title = { ...layout.title, text: layout.title.text.replace(NOTE, NOTE.replace("<span", "<br><span")), pad: { ...layout.title.pad, t: 16 } };
    layout.margin.t = (layout.margin.t ?? 60) + 16;
  }

  // The first line of a title is no longer than the figure.
  function fitTitle(layout) {
    const [line] = (layout.title?.text ?? "").split(/<br>|<span/);
    const room = (layout.width - EDGES) / (LETTER * line.replace(/<[^>]*>/g, "").length);
    const size = Math.min(layout.title?.font?.size ?? Infinity, room);
    if (Number.isFinite(size)) layout.title = { ...layout.title, font: { ...layout.title.font, size } };
  }

  async function figures() {
    const places = [...document.querySelectorAll("figure.plot")];
    if (!places.length || !window.DecompressionStream) return;
    const [all, program] = await Promise.all([unpacked("figures").then(JSON.parse), unpacked("plotly")]);
    const script = document.createElement("script");
    script.textContent = program;
    document.head.append(script);
    script.remove();
    const made = new Map(places.map((place) => [place, new Figure(place, JSON.stringify(all[Number(place.dataset.figure)]))]));
    const waiting = new Set(places);
    const seen = new IntersectionObserver(
      (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => show(entry.target)),
      { rootMargin: "600px" },
    );
    const resized = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const figure = made.get(target);
        if (figure.width && target.clientWidth && target.clientWidth !== figure.width && !printing) figure.draw();
      }
    });
    function show(place) {
      if (!waiting.has(place) || !place.clientWidth) return;
      waiting.delete(place);
      made.get(place).draw();
      resized.observe(place);
    }
    places.forEach((place) => seen.observe(place));
    // The remaining figures are drawn when the browser is idle, so that they are ready for print.
    const rest = () => {
      const next = [...waiting].find((place) => place.clientWidth);
      if (!next) return root.setAttribute("data-figures", "drawn");
      show(next);
      return (window.requestIdleCallback ?? setTimeout)(rest, { timeout: 500 });
    };
    rest();
    paper = () => {
      [...waiting].forEach(show);
      const half = (place) => place.closest(".charts > :not(.wide)");
      made.forEach((figure, place) => figure.draw(half(place) ? HALF : PAPER, { ink: "#111", grid: "#ddd" }));
    };
    screen = () => made.forEach((figure) => figure.draw());
  }

  // ---- print: light colours, every section open, every figure as wide as the page

  let printing = false;
  let paper = () => {};
  let screen = () => {};
  let opened = [];
  addEventListener("beforeprint", () => {
    if (printing) return;
    printing = true;
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((fold) => (fold.open = true));
    paper();
  });
  addEventListener("afterprint", () => {
    opened.forEach((fold) => (fold.open = false));
    printing = false;
    screen();
  });

  const fits = new ResizeObserver((entries) => entries.forEach(({ target }) => reach(target)));
  document.querySelectorAll("pre, .wide-table").forEach((text) => fits.observe(text));

  // On a narrow screen the table of contents is closed at first.
  const contents = document.querySelector("nav > details");
  if (contents && matchMedia("(max-width: 1100px)").matches) contents.open = false;

  // ---- machines: a film of one step, which plays when the reader asks for it; its key frames are printed

  async function machines() {
    const places = [...document.querySelectorAll(".machine")];
    if (!places.length || !window.DecompressionStream) return;
    const films = JSON.parse(await unpacked("films"));
    for (const place of places) {
      const box = document.createElement("div");
      box.className = "labkit-machine";
      place.prepend(box);
      fits.observe(box);
      new Stage(box, { ...films[Number(place.dataset.film)], moves: false });
      place.classList.add("drawn");
    }
  }

  requestAnimationFrame(() => setTimeout(() => machines().then(figures))); // show the text first
})();
