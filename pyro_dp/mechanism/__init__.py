"""The only code that makes data public: clip, sum, sample, noise, release."""
