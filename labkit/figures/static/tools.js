// A chart of plotly for people who use no mouse or do not see it: its letters and marks are not read one by one, and its
// tools are one stop of the Tab key, from where the arrow keys lead from tool to tool. Called after each drawing.
function accessible(chart) {
  for (const drawing of chart.querySelectorAll(".main-svg")) drawing.setAttribute("aria-hidden", "true");
  const bar = chart.querySelector(".modebar");
  const tools = [...(bar?.querySelectorAll("button") ?? [])]; // older versions have links, which no key reaches
  if (!tools.length) return;
  const stop = (chosen) => tools.forEach((tool) => (tool.tabIndex = tool === chosen ? 0 : -1));
  stop(tools.find((tool) => tool === document.activeElement) ?? tools[0]);
  bar.setAttribute("role", "toolbar");
  bar.setAttribute("aria-label", "tools of the chart");
  bar.onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const next = tools.at((tools.indexOf(document.activeElement) + by) % tools.length);
    stop(next);
    next.focus();
  };
}
