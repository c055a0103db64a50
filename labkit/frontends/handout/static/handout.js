// The page's program: plotly is unpacked after the text is there, figures are drawn as they come near, and for paper all of them.
"use strict";
(() => {
  const root = document.documentElement;
  const PAPER = 680; // px: what both A4 and Letter have between their margins
  const HALF = 332; // of two side by side
  const ROOM = 640; // of a picture that has many parts
  const INK = "%INK%";
  const GRID = "%GRID%";
  const CLEAR = "rgba(0,0,0,0)"; // the ground of a figure that paints none
  const NOTE = "</b><span";

  // ---- light and dark: as the system is, until a person chooses

  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const remember = (theme) => {
    try {
      localStorage.setItem("labkit-theme", theme);
    } catch {
      // a browser that keeps nothing for files: the choice holds until the page is closed
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

  function theme() {
    const style = getComputedStyle(document.body);
    return { ink: style.color, grid: style.columnRuleColor }; // a colour that was computed, which a variable is not
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
      if (!width) return; // in a fold that is closed
      const text = this.source.replaceAll(JSON.stringify(INK), JSON.stringify(ink.ink)).replaceAll(JSON.stringify(GRID), JSON.stringify(ink.grid));
      const { data, layout = {}, frames } = JSON.parse(text);
      const plain = layout.template?.layout?.paper_bgcolor ? {} : { paper_bgcolor: CLEAR, plot_bgcolor: CLEAR, font: { color: ink.ink } };
      const shown = this.place.closest(".charts") ? width : Math.max(width, room(layout));
      const fitted = { ...plain, ...layout, font: { ...plain.font, ...layout.font }, width: shown, height: layout.height || 450, autosize: false };
      if (shown < 520) narrow(fitted, data);
      for (const trace of data) if (trace.meta?.ink && trace.line) trace.line.color = ink.ink;
      const first = !this.width;
      this.width = width;
      const config = { displaylogo: false, responsive: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
      window.Plotly.react(this.box, data, fitted, config);
      if (first && frames?.length) window.Plotly.addFrames(this.box, frames);
      this.place.classList.add("drawn");
      drawn.add(this);
    }
  }

  // Pictures of several parts, or of many marks, are scrolled on a phone and not squeezed.
  function room(layout) {
    const marks = (layout.shapes?.length ?? 0) + (layout.annotations?.length ?? 0);
    return layout.xaxis2 || marks > 8 ? ROOM : 0;
  }

  // On a phone the legend stands below the picture and not beside it, and what is noted beside the title below that.
  function narrow(layout, data) {
    const several = Object.keys(layout).filter((name) => /^legend\d+$/.test(name)).length > 0;
    if (!several && layout.showlegend !== false && data.some((trace) => trace.showlegend !== false)) {
      layout.legend = { ...layout.legend, orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom" };
      layout.margin = { ...layout.margin, r: 12, b: (layout.margin?.b ?? 60) + 56 };
      layout.height += 56;
    }
    if (!layout.title?.text?.includes(NOTE)) return;
    layout.title = { ...layout.title, text: layout.title.text.replace(NOTE, NOTE.replace("<span", "<br><span")), pad: { ...layout.title.pad, t: 16 } };
    layout.margin.t = (layout.margin.t ?? 60) + 16;
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
    // What nobody has come near yet is drawn in idle moments, so that Print finds it.
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

  // ---- paper: light, every fold open, every figure as wide as the sheet

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

  // A link into a fold opens it; on a narrow screen the contents begin closed.
  const contents = document.querySelector("nav > details");
  if (contents && matchMedia("(max-width: 1100px)").matches) contents.open = false;

  requestAnimationFrame(() => setTimeout(figures)); // the text is painted first
})();
