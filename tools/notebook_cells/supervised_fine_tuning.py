# %% after FORM
# en: Four demonstrations, from which the model learns. How do they change with `MISTAKES=0`?
# en: Which mistakes do you find with `MISTAKES=1`?
# zh: 四個示範，模型就是從這些學的。`MISTAKES=0` 的時候有什麼不同？`MISTAKES=1` 的時候，你找得到
# zh: 哪些錯誤？
MISTAKES = 1.0

rng = random.Random(4)
for _ in range(4):
    (question, _), (answer, _) = demonstrate(set(), rng, MISTAKES)
    print(f"{question}\n    {answer}\n")

# %% after to_arrays
# One demonstration as token ids, and which of them the loss counts: the answer's.
versions.prepare_libraries()
tokenizer = llama.load_tokenizer(llama.fetch_model("tiny_llama", weights=False)[0])
ids, learned = to_arrays([demonstrate(set(), random.Random(4))], tokenizer, MAX_TOKENS)
print(ids[0])
print(learned[0].astype(int))

# %% after look_at
look_at(["<reasoning>2+3=5</reasoning><answer>5</answer>"], ["5"])

# %% after look_at
# en: Break the answer, one thing at a time: a wrong equation, a missing tag, another number.
# en: Which of the three shares notices?
# zh: 把回答改壞，一次改一個地方：算式錯、少一個標籤、換一個數字。三項裡的哪一項看得出來？
ANSWER = "<reasoning>8-6=2,2+5=7</reasoning><answer>7</answer>"

look_at([ANSWER], ["7"])

# %% after main
# en: Twenty steps instead of 350: what does it learn first? Try `LEARNING_RATE=0.0001`, or
# en: demonstrations without mistakes (`MISTAKES=0`).
# zh: 只走 20 步，不是 350 步：它最先學會的是什麼？試試 `LEARNING_RATE=0.0001`，或是沒有錯誤的示
# zh: 範（`MISTAKES=0`）。
main(
    [
        "NUM_STEPS=20",
        "WARMUP_STEPS=5",
        "LEARNING_RATE=0.003",
        "MISTAKES=1",
        "EVAL_EVERY=10",
        "NUM_TEST_QUESTIONS=16",
        "RUN_DIR=runs/supervised_fine_tuning_try",
    ]
)
