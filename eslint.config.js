import js from "@eslint/js";

export default [
  js.configs.recommended,
  {
    rules: {
      eqeqeq: "error",
      "no-undef": "off", // tsc finds these names
      "no-unused-vars": "error",
      "prefer-const": "error",
    },
  },
];
