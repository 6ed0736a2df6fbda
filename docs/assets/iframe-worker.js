// Browsers start no Worker in a page that was opened from a disk. There the script of the search runs in a
// hidden frame instead; `scripts/mkdocs.yml` names this file.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.ready = this.load(url);
    }

    load(url) {
      const script = this.inside.document.createElement("script");
      script.src = new URL(url, location);
      this.inside.document.documentElement.append(script);
      return new Promise((done, failed) => Object.assign(script, { onload: done, onerror: failed }));
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
