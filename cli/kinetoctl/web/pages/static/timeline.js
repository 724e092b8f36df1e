// Hands the trace to the Perfetto UI, which is another origin: asked until it answers, then one message. The UI starts
// once it is known which tracks to pin above all others and which time to show: it takes the tracks only in its address,
// and a message about the time is lost if the trace takes long to load.
const frame = document.getElementById("timeline");
const state = document.getElementById("timeline-state");
const {page, ui, trace, name} = frame.dataset;
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

const start = ({tracks = [], start_ns, end_ns}) => new Promise((resolve) => {
  const command = {id: "dev.perfetto.PinTracksByRegex", args: [`^(${tracks.map(escaped).join("|")})( |$)`]};
  const pinned = tracks.length ? `&startupCommands=${encodeURIComponent(JSON.stringify([command]))}` : "";
  frame.src = page + pinned + (end_ns ? `&visStart=${start_ns}&visEnd=${end_ns}` : "");
  const asking = setInterval(() => frame.contentWindow.postMessage("PING", ui), 200);
  addEventListener("message", (event) => {
    if (event.origin !== ui || event.source !== frame.contentWindow || event.data !== "PONG") return;
    clearInterval(asking);
    resolve();
  });
});

try {
  const answer = await fetch(trace, {credentials: "same-origin"});
  if (!answer.ok) throw new Error(await answer.text());
  const focus = JSON.parse(answer.headers.get("Kineto-Focus") ?? "{}");
  const [buffer] = await Promise.all([answer.arrayBuffer(), start(focus)]);
  frame.contentWindow.postMessage({perfetto: {buffer, title: name, keepApiOpen: true}}, ui);
  state.textContent = `${name} is open below.`;
} catch (error) {
  state.textContent = `The trace could not be loaded: ${error.message}`;
}
