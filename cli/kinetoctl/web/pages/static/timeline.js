// Hands the trace to the Perfetto UI, which is another origin: asked until it answers, then one message.
const frame = document.getElementById("timeline");
const state = document.getElementById("timeline-state");
const {ui, trace, name} = frame.dataset;

const ready = new Promise((resolve) => {
  const asking = setInterval(() => frame.contentWindow.postMessage("PING", ui), 200);
  addEventListener("message", (event) => {
    if (event.origin !== ui || event.source !== frame.contentWindow || event.data !== "PONG") return;
    clearInterval(asking);
    resolve();
  });
});

const load = async () => {
  const answer = await fetch(trace, {credentials: "same-origin"});
  if (!answer.ok) throw new Error(await answer.text());
  return answer.arrayBuffer();
};

try {
  const [buffer] = await Promise.all([load(), ready]);
  frame.contentWindow.postMessage({perfetto: {buffer, title: name, keepApiOpen: true}}, ui);
  state.textContent = `${name} is open below.`;
} catch (error) {
  state.textContent = `The trace could not be loaded: ${error.message}`;
}
