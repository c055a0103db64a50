// In front of each of our programs: finds out whether messages from the kernel arrive in the rendered view.
//
// The kernel answers "rendered" with "ping". When it has handled "rendered", as its status says, and no "ping" has
// arrived, the view sends "lost", and the kernel opens the widget again.

const GRACE = 1000; // ms, for a client in which a status may overtake a message

function withHandshake(render) {
  return (context) => {
    const { model } = context;
    let connected = false;
    let waiting = 0;
    const heard = (message) => {
      if (message.kind !== "ping") return;
      connected = true;
      model.send({ kind: "pong" });
    };
    const status = (message) => {
      if (message.content.execution_state !== "idle") return;
      waiting = setTimeout(() => connected || model.send({ kind: "lost" }), GRACE);
    };
    model.on("msg:custom", heard);
    model.send({ kind: "rendered" }, { iopub: { status } });
    const close = render(context);
    return () => {
      clearTimeout(waiting);
      model.off("msg:custom", heard);
      close();
    };
  };
}
