// The log view: only new lines arrive, a bounded number stays in the page, and text is only set as text, never as HTML.

const KEPT = 1000; // lines, as many as a new page receives
const TYPED = 300; // ms without a key press before a search starts
const COLOUR_CODES = /\x1b\[[0-?]*[ -\/]*[@-~]/g;

function make(tag, name, properties = {}) {
  const element = document.createElement(tag);
  element.className = name;
  return Object.assign(element, properties);
}

function choice(label, options) {
  const select = make("select", "labkit-log-choice", { ariaLabel: label });
  fill(select, options);
  return select;
}

function fill(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", "", { value, textContent: text })));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

// The text with all matches of the query marked, ignoring case.
function marked(text, query) {
  const span = make("span", "labkit-log-text");
  const wanted = query.toLowerCase();
  const low = text.toLowerCase();
  let done = 0;
  for (let at = wanted ? low.indexOf(wanted) : -1; at >= 0; at = low.indexOf(wanted, done)) {
    span.append(text.slice(done, at), make("mark", "", { textContent: text.slice(at, at + query.length) }));
    done = at + query.length;
  }
  span.append(text.slice(done));
  return span;
}

// A line is [rank, stream, text, line number in the file for a match, else null]; a note has no rank.
function row([rank, stream, text, number], colours, query) {
  if (rank === null) return make("div", "labkit-log-line labkit-log-note", { textContent: text });
  const element = make("div", `labkit-log-line labkit-log-${stream === "stderr" ? "stderr" : "stdout"}`);
  const mark = stream === "stderr" ? " err" : ""; // not by colour alone
  const who = make("span", "labkit-log-rank", { textContent: (number === null ? `${rank}` : `${rank}:${number}`) + mark, title: `rank ${rank} ${stream}` });
  who.style.borderColor = colours[rank] ?? "";
  element.append(who, marked(text.replace(COLOUR_CODES, ""), query));
  return element;
}

function render({ model, el }) {
  el.classList.add("labkit-logs");
  const rank = choice("Rank", [["", "all ranks"]]);
  const stream = choice("Stream", [["", "stdout + stderr"], ["stdout", "stdout"], ["stderr", "stderr"]]);
  const search = make("input", "labkit-log-search", { type: "search", placeholder: "Search the whole log", ariaLabel: "Search the whole log" });
  const note = make("span", "labkit-log-count", { role: "status" });
  const hint = "Scroll to new lines automatically";
  const follow = make("button", "labkit-log-follow", { type: "button", textContent: "Follow", title: hint });
  const lines = make("div", "labkit-log-lines", { tabIndex: 0, role: "log", ariaLabel: "Output of the ranks" });
  const bar = make("div", "labkit-log-bar");
  bar.append(rank, stream, search, note, follow);
  el.append(bar, lines);

  let following = true;
  let colours = [];
  let query = ""; // the query of the lines on screen
  let pending = null; // what is typed or was asked for, until its answer has come: older answers leave the fields alone
  const setFollowing = (value) => {
    following = value;
    follow.classList.toggle("labkit-on", value);
    follow.setAttribute("aria-pressed", String(value));
    if (value) lines.scrollTop = lines.scrollHeight;
  };
  const append = (message) => {
    if (message.fresh) lines.replaceChildren();
    lines.append(...message.lines.map((line) => row(line, colours, query)));
    const before = lines.scrollHeight;
    while (lines.childElementCount > KEPT) lines.firstElementChild.remove();
    if (following && !query) lines.scrollTop = lines.scrollHeight;
    else if (before !== lines.scrollHeight) lines.scrollTop -= before - lines.scrollHeight;
  };
  const heard = (message) => {
    if (message.kind !== "lines") return;
    colours = message.colours ?? colours;
    if (message.fresh) {
      fill(rank, [["", "all ranks"], ...message.ranks.map((number) => [String(number), `rank ${number}`])]);
      query = message.wanted.query;
      if (pending === text(message.wanted)) pending = null;
      if (pending === null) ({ rank: rank.value, stream: stream.value, query: search.value } = message.wanted);
    }
    note.textContent = message.note;
    append(message);
  };

  const text = (wanted) => JSON.stringify([wanted.rank, wanted.stream, wanted.query]);
  const ask = () => {
    const wanted = { rank: rank.value, stream: stream.value, query: search.value };
    pending = text(wanted);
    model.send({ kind: "show", ...wanted });
  };
  rank.onchange = stream.onchange = () => ask();
  // Search while typing, because the notebook handles the Enter key itself.
  let typing = 0;
  search.oninput = () => {
    clearTimeout(typing);
    pending = "typing";
    typing = setTimeout(() => ask(), TYPED);
  };
  follow.onclick = () => setFollowing(!following);
  lines.onscroll = () => {
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 24;
    if (following && !atEnd && lines.clientHeight) setFollowing(false);
  };
  // A hidden tab has no height: scroll to the end when it becomes visible.
  const seen = new ResizeObserver(() => following && (lines.scrollTop = lines.scrollHeight));
  seen.observe(lines);

  setFollowing(true);
  model.on("msg:custom", heard);
  model.send({ kind: "ready" }); // the kernel owns the filter and the search: a new view shows those of the last one
  return () => {
    clearTimeout(typing);
    seen.disconnect();
    model.off("msg:custom", heard);
  };
}

export default { render: withHandshake(render) };
