// What outlives a reload: one training, in this browser's own database. Nothing of it leaves the machine.

const opened = () => new Promise((done, fail) => {
  const request = indexedDB.open("grpo-playground", 1); // throws where a page may keep nothing
  request.onupgradeneeded = () => request.result.createObjectStore("kept");
  request.onsuccess = () => done(request.result);
  request.onerror = () => fail(request.error);
});

async function within(mode, act) {
  const database = await opened();
  try {
    return await new Promise((done, fail) => {
      const transaction = database.transaction("kept", mode), request = act(transaction.objectStore("kept"));
      transaction.oncomplete = () => done(request.result);
      transaction.onerror = transaction.onabort = () => fail(transaction.error);
    });
  } finally {
    database.close();
  }
}

/** Whether `value` is kept now. */
export async function keep(value) {
  try {
    await within("readwrite", (store) => store.put(value, "run"));
    return true;
  } catch {
    return false;
  }
}

/** What was kept last; undefined without any, or where the browser keeps nothing. */
export async function kept() {
  try {
    return await within("readonly", (store) => store.get("run"));
  } catch {
    return undefined;
  }
}
