# %% before make_mesh
# en: Eight devices as a grid. What do 8 x 1 and 2 x 4 look like?
# zh: 八個裝置排成網格。8 x 1 和 2 x 4 是什麼樣子？
jax.config.update("jax_platforms", "cpu")  # whatever else this machine has
jax.config.update("jax_num_cpu_devices", DEVICES)  # both must come before the first array
versions.prepare_libraries()
SHAPE = 4, 2

np.array([device.id for device in jax.devices()]).reshape(SHAPE)

# %% after make_mesh
make_mesh(STRATEGIES["both"])

# %% after spec_of
# en: The rules say which mesh axis cuts which axis of an array. Let `mlp` go to `data`, or to
# en: `None`: which of the weights' axes is cut then, and into how many parts?
# zh: 規則說的是：陣列的哪一軸，沿著 mesh 的哪一軸切。把 `mlp` 換成 `data`，或是 `None`：權重的哪
# zh: 一軸會被切開？切成幾份？
RULES = {"batch": "data", "mlp": "model", "embed": None}

{name: spec_of(axes, RULES) for name, axes in LOGICAL_AXES.items()}

# %% after make_layer
both = STRATEGIES["both"]
make_layer(Constants(), both, make_mesh(both)).kernel.get_value().sharding

# %% after run_strategy
run_strategy(Constants(), STRATEGIES["data parallel"])["step"]

# %% after run_strategy
# en: What has to travel between the devices? Try the other `NAME`s of `STRATEGIES`, then a layer
# en: of `MLP=256`. Which messages grow with it, and which don't?
# zh: 裝置之間要傳什麼？把 `NAME` 換成 `STRATEGIES` 的其他名字，再換成 `MLP=256`。哪些訊息會跟著
# zh: 變大？
NAME, MLP = "FSDP", 32

result = run_strategy(Constants(MLP=MLP), STRATEGIES[NAME])
print("forward pass:", result["forward"])
print("training step:", result["step"])
