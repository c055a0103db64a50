// The picture of the machine in the panel: the kernel sends a film, and then only what changes.

function render({ model, el }) {
  el.classList.add("labkit-machine");
  el.innerHTML = model.get("still"); // drawn and escaped by the kernel
  let stage = null;
  const heard = (message) => {
    if (message.kind === "film") stage ? stage.take(message) : (stage = new Stage(el, message));
    else if (message.kind === "shapes") stage?.change(message.shapes, message.moves, message.label);
  };
  model.on("msg:custom", heard);
  model.send({ kind: "ready" });
  return () => {
    model.off("msg:custom", heard);
    stage?.close();
  };
}

export default { render: withHandshake(render) };
